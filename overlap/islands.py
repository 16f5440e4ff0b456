"""Slices of routed exchanges alone: an island is a dispatch, its experts and its combine.

    token     slice j has its share of the tokens. Their router, top-k and whatever surrounds the
              island stay un-sliced; dispatch to combine runs once per slice
    expert    slice j has its share of each rank's experts, cut out of every destination's rows.
              Every expert sees the rows that it sees in the whole program, in the same order, and
              rows are back in that order before anything sums over them

Both start from the proof along tokens (`overlap.slicing`). For experts it carries over: whatever
holds for every vector of counts holds for the counts of some experts with zeros for the others, and
that is what a slice's rows are. Where an island cannot be sliced, it stays as it is, with a remark.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from overlap import collectives, exactness, graph, slicing
from overlap import placement as pl
from overlap.certificate import Certificate
from overlap.collectives import Kind
from overlap.errors import PassError
from overlap.placement import Counts, Decision, Op, Refusal, Split
from overlap.regions import Scope
from overlap.slicing import Island, Plan, Refused, Rows


def analyse_tokens(
    gm: fx.GraphModule, scope: Scope | None = None, exact: Certificate | None = None
) -> Plan:
    """The plan for slices of the tokens of every island in `scope` (all of them). With a
    certificate, one that changes no bit: there is none, for an expert's rows come slice by slice.

    Raises PassError where no exchange is routed, or a value that slices need cannot be had.
    """
    return _only_islands(gm, _prove(gm, scope, exact))


def analyse_experts(
    gm: fx.GraphModule, scope: Scope | None = None, exact: Certificate | None = None
) -> Plan:
    """The plan for slices of the local experts of every island in `scope` (all of them). With a
    certificate, one that changes no bit: an island that holds something that does is left
    un-sliced.

    Raises PassError where no exchange is routed, or a value that slices need cannot be had.
    """
    plan = _prove(gm, scope, None)
    islands = {key: island for key, island in _islands(plan).items() if island.experts > 1}
    small = [_one_expert_each(i.dispatch) for i in _islands(plan).values() if i.experts == 1]
    result = _by_experts(gm, plan, islands)
    while exact is not None and (inexact := _first_inexact(gm, result, exact)):
        keys, refused = inexact
        islands = {key: island for key, island in islands.items() if key not in keys}
        small.append(refused)
        result = _by_experts(gm, plan, islands)
    remarks = (*result.remarks, *small)
    return dataclasses.replace(result, remarks=remarks, is_exact=exact is not None)


def is_routed(gm: fx.GraphModule) -> bool:
    """Whether an all-to-all is split by counts."""
    return any(map(_has_counted_splits, gm.graph.nodes))


def _prove(gm: fx.GraphModule, scope: Scope | None, exact: Certificate | None) -> Plan:
    """The proof along tokens: of the counts that there may be, the one that proves most."""
    exchanges = [
        node
        for node in gm.graph.nodes
        if _has_counted_splits(node) and (scope is None or scope.has(node))
    ]
    if not exchanges:
        raise PassError("no all-to-all is split by counts, so there is no island to slice")
    best: Plan | None = None
    for rows in _token_counts(gm, exchanges):
        plan = slicing.prove(gm, rows, scope, exact)
        if best is None or _proven(plan) > _proven(best):
            best = plan
        if {node.name for node in exchanges} <= {*best.sliced_starts}:
            break
    if best is None:
        raise PassError(
            "no all-to-all depends on a choice of experts, so there is no island to slice"
        )
    return dataclasses.replace(best, remarks=tuple(_remarks(best, exchanges)))


def _proven(plan: Plan) -> tuple[int, int]:
    return len(plan.sliced_starts), sum(map(plan.is_sliced, plan.decisions))


def _token_counts(gm: fx.GraphModule, exchanges: Sequence[fx.Node]) -> list[Rows]:
    """How many tokens there may be: the rows of the choices that exchanges depend on, the integers
    that are made of numbers (a top-k, an argmax)."""
    before = slicing.ancestors(exchanges)
    sizes: dict[sympy.Expr, Rows] = {}
    for node in filter(before.__contains__, gm.graph.nodes):
        value = graph.fake_value(node)
        if _is_of(value, torch.int64) and value.dim() and _reads_numbers(node):
            size = pl.expression(value.shape[0])
            sizes.setdefault(size, Rows(size, axis="token"))
    return list(sizes.values())


def _is_of(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is dtype


def _reads_numbers(node: fx.Node) -> bool:
    """Whether an operand, or one of what a node takes an item of, holds floating-point numbers."""
    operands = node.all_input_nodes
    if node.target is operator.getitem:
        operands = operands[0].all_input_nodes
    values = [graph.fake_value(n) for n in operands]
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def _has_counted_splits(node: fx.Node) -> bool:
    """Whether a node starts an all-to-all that is split by numbers of the data."""
    if not collectives.is_start(node) or collectives.kind_of(node) is not Kind.ALL_TO_ALL:
        return False
    return any(isinstance(n, fx.Node) for n in collectives.splits_of(node)[1])


def _remarks(plan: Plan, exchanges: Sequence[fx.Node]) -> Iterator[Refused]:
    """Why exchanges are not sliced. Joins outside of islands are nothing to remark on: the way back
    from an exchange ends where its tokens begin."""
    whole = [node for node in exchanges if node.name not in plan.sliced_starts]
    seen: dict[fx.Node, None] = {}
    stack = whole
    while stack:
        node = stack.pop()
        decision = plan.decisions[node]
        is_seed = (
            decision.once
            and isinstance(decision.placement, Split)
            and not any(pl.is_sliced(plan.decisions[n].placement) for n in node.all_input_nodes)
        )
        if node not in seen and not is_seed:
            seen[node] = None
            stack.extend(node.all_input_nodes)
    is_kept = slicing.EXCHANGE_KEPT
    return (r for r in plan.remarks if r.node in seen or r.is_asked or r.consequence == is_kept)


# --- tokens ---------------------------------------------------------------------------------------


def _only_islands(gm: fx.GraphModule, plan: Plan) -> Plan:
    """Compute once whatever reads rows in the order of the tokens and leaves them so. Counts are
    those of a slice, since its splits are made of them."""

    def is_outside(node: fx.Node) -> bool:
        place = plan.decisions[node].placement
        return pl.is_joinable(place) and not isinstance(place, Counts)

    result = {
        node: Decision(decision.placement, once=True)
        if not decision.once
        and plan.is_sliced(node)
        and all(map(is_outside, (node, *node.all_input_nodes)))
        else decision
        for node, decision in plan.decisions.items()
    }
    starts = slicing.sliced_starts(gm, result)
    return dataclasses.replace(plan, decisions=result, sliced_starts=starts)


# --- experts --------------------------------------------------------------------------------------


def _by_experts(gm: fx.GraphModule, plan: Plan, islands: Mapping[str, Island]) -> Plan:
    """Between dispatch and combine a node runs once per slice; all else is computed once."""
    parts: dict[fx.Node, None] = {}  # nodes that slices have a part of
    result: dict[fx.Node, Decision] = {}
    for node, decision in plan.decisions.items():
        reads_parts = any(n in parts and not is_returned(n, plan) for n in node.all_input_nodes)
        if decision.once or not _is_part(node, plan, islands, reads_parts):
            result[node] = Decision(decision.placement, once=True, drop=decision.drop)
        else:
            parts[node] = None
            is_one = is_of_one_expert(node, decision, plan)
            result[node] = dataclasses.replace(decision, summed=()) if is_one else decision
    return dataclasses.replace(
        plan,
        axis="expert",
        decisions=result,
        sliced_starts=slicing.sliced_starts(gm, result),
        islands=islands,
    )


def _islands(plan: Plan) -> dict[str, Island]:
    """By routing key, what was dispatched by it."""
    found: dict[str, Island] = {}
    for node, decision in plan.decisions.items():
        match decision.placement:
            case Split(0, pl.Received(dispatch, segments, back)) if dispatch == node.name:
                ranks, experts = (1 + max(s.label[i] for s in segments) for i in (0, 1))
                island = found.setdefault(back.key, Island(node, ranks, experts))
                if (island.ranks, island.experts) != (ranks, experts):
                    raise PassError(
                        f"rows of {back.key} go to {island.ranks} ranks, and again to {ranks}"
                    )
            case _:
                pass
    return found


def _is_part(node: fx.Node, plan: Plan, islands: Mapping[str, Island], reads_parts: bool) -> bool:
    """Whether slices have a part of the node's value: what a dispatch brings, counts of it, and
    whatever is made of these until a combine takes the rows back."""
    placement = plan.decisions[node].placement
    is_here = not slicing.routing_keys(placement).isdisjoint(islands)
    match placement:
        case Counts():
            return is_here and not _is_source(node, plan)
        case Split(0, pl.Received(dispatch)) if dispatch == node.name:
            return is_here
        case _:
            return reads_parts


def _is_source(node: fx.Node, plan: Plan) -> bool:
    """Whether counts are had as a whole: a histogram, or what an exchange of counts brought."""
    if collectives.is_start(node) or collectives.is_wait(node):
        return True
    operands = (plan.decisions[n].placement for n in node.all_input_nodes)
    return not any(isinstance(placement, Counts) for placement in operands)


def is_returned(node: fx.Node, plan: Plan) -> bool:
    """Whether a node waits for rows that a combine takes back."""
    match plan.decisions[node].placement:
        case Split(0, pl.Sorted()):
            return collectives.is_wait(node)
        case _:
            return False


def is_of_one_expert(node: fx.Node, decision: Decision, plan: Plan) -> bool:
    """Whether all rows that a node computes together are one expert's: then they are the rows that
    it computes together in the program as written, in the same order."""
    if decision.groups is not None:
        rows = [group.experts for group in decision.groups.groups]
    else:
        own = (decision.placement, *(plan.decisions[n].placement for n in node.all_input_nodes))
        rows = [frozenset[int]().union(*map(experts_of, own))]
    return all(len(experts) <= 1 for experts in rows)


def _first_inexact(
    gm: fx.GraphModule, plan: Plan, certificate: Certificate
) -> tuple[frozenset[str], Refused] | None:
    """A node of an island that changes bits, with the keys of its island."""
    graded = exactness.differentiable(gm.graph)
    placements = {node: decision.placement for node, decision in plan.decisions.items()}
    sources: dict[fx.Node, frozenset[str]] = {}
    for node, decision in plan.decisions.items():
        keys = slicing.routing_keys(decision.placement) & plan.islands.keys()
        before = (sources[n] for n in node.all_input_nodes)
        sources[node] = frozenset(keys).union(*before)
        if decision.once or decision.drop or not plan.is_sliced(node):
            sources[node] = frozenset()
            continue
        op = Op(node, pl.schema_arguments(node), placements, plan.batch)
        try:
            _check_exact(op, decision, plan, certificate, graded)
        except Refusal as refusal:
            refused = Refused(node, refusal.reason, slicing.EXCHANGE_KEPT, refusal.advice)
            return sources[node] or frozenset(plan.islands), refused
    return None


def _check_exact(
    op: Op, decision: Decision, plan: Plan, certificate: Certificate, graded: set[fx.Node]
) -> None:
    """Raise Refusal for a node of an island that may change bits."""
    if graph.draws_random_numbers(op.node):
        raise op.refuse("draws random numbers for the rows of several experts (numerics='exact')")
    if decision.reassociates:
        raise op.refuse("adds up the rows of several experts (numerics='exact')")
    if decision.summed:
        names = ", ".join(exactness.names_of(decision.summed))
        raise op.refuse(
            f"uses {names} for the rows of several experts, so that its gradient would be a sum "
            "over slices (numerics='exact')",
            "give each expert its own call",
        )
    if not is_of_one_expert(op.node, decision, plan) or not exactness.is_aligned(op):
        exactness.check_kernel(op, decision, certificate, graded)


def experts_of(placement: pl.Placement) -> frozenset[int]:
    """The local experts whose rows a value holds."""
    match placement:
        case Split(_, pl.Received(_, segments)):
            return frozenset(segment.label[1] for segment in segments)
        case _:
            return frozenset()


def _one_expert_each(dispatch: fx.Node) -> Refused:
    return Refused(
        dispatch,
        f"{dispatch.name} sends rows to ranks of one expert each, which leaves none to share out",
        slicing.EXCHANGE_KEPT,
        "use axis='token', or fewer ranks for the experts",
    )
