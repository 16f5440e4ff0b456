"""What slicing a forward graph makes of every node: pure analysis, before a node is written.

    prove     a decision per node: once per slice, or once on joined values, with the reason
    trimmed   the same, without work before the first and behind the last collective that gains
              nothing from slices
    analyse   both, along the rows that slice the most collectives

Rows are those of the batch, sequences or the tokens of a single one, which stay apart through the
whole program; or the tokens of each routed exchange (`overlap.islands`).

Joining is always right, so whatever has no proof is computed once. Three things keep a value from
being joined or cut, and each has its way out: rows in a slice's own order cannot be joined (then
the ids that routed them become plain data, and their exchange stays un-sliced); a storage that is
written in place has to be one storage (then all its values are computed once); and where neither
helps, PassError says so and the program stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

import overlap.rules  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers them
from overlap import collectives, exactness, graph, regions
from overlap import placement as pl
from overlap.certificate import Certificate
from overlap.errors import PassError
from overlap.placement import Base, Decision, Many, Op, Refusal, Split
from overlap.regions import Scope

aten = torch.ops.aten
EXCHANGE_KEPT = "the exchange is not sliced"
_JOINED = "the slices are joined before it"
_HEAVY = (aten.linear, aten.matmul, aten.mm, aten.addmm, aten.bmm, aten.einsum)


@dataclasses.dataclass(frozen=True)
class Refused:
    """A node that is not sliced.

    reason: subject, verb, expected against found.
    consequence: what happens instead.
    advice: what the user can change; "" for nothing.
    is_asked: whether the user asked for just that.
    """

    node: fx.Node
    reason: str
    consequence: str
    advice: str
    is_asked: bool = False

    @property
    def message(self) -> str:
        return f"{self.reason}; {self.consequence}"


@dataclasses.dataclass(frozen=True)
class Island:
    """A routed exchange: `dispatch` sends rows to `ranks`, with `experts` on each of them."""

    dispatch: fx.Node
    ranks: int
    experts: int

    def experts_of(self, index: int, slices: int) -> range:
        """The local experts of one of so many slices."""
        return range(self.experts * index // slices, self.experts * (index + 1) // slices)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What slicing makes of every node.

    axis: what a slice is cut along: "batch", "token" or "expert".
    batch: how many rows are cut into slices.
    decisions: per node, in program order.
    sliced_starts: names of the collectives that run once per slice.
    refused: everything that is not sliced, in program order.
    remarks: the part of it that keeps a collective from being hidden.
    islands: by routing key, what is sliced along experts.
    is_exact: every value and gradient is to have the bits of the program as written.
    unit: rows are cut in multiples of it; those that remain are the last slice's.
    """

    axis: str
    batch: sympy.Expr
    decisions: dict[fx.Node, Decision]
    sliced_starts: tuple[str, ...]
    refused: tuple[Refused, ...]
    remarks: tuple[Refused, ...]
    islands: Mapping[str, Island] = dataclasses.field(default_factory=dict[str, Island])
    is_exact: bool = False
    unit: int = 1

    @property
    def reassociated(self) -> tuple[str, ...]:
        """The sums that slicing reassociates, for the report: those of the forward, and gradients
        by parameter."""
        sliced = [d for d in self.decisions.values() if not d.once]
        gradients = exactness.names_of(node for d in sliced for node in d.summed)
        return (
            *(d.reassociates for d in sliced if d.reassociates),
            *(f"gradient of {name}" for name in gradients),
        )

    def is_sliced(self, node: fx.Node) -> bool:
        """Whether the node runs once per slice."""
        decision = self.decisions[node]
        return not decision.once and pl.is_sliced(decision.placement)


def analyse(
    gm: fx.GraphModule,
    scope: Scope | None = None,
    exact: Certificate | None = None,
    trim_end: bool = True,
) -> Plan:
    """The plan for slices of the batch that slices the most collectives; of equal ones, along the
    first input's rows. With a certificate, one that changes no bit.

    Raises PassError where there is no batch, or a value that slices need cannot be had.
    """

    def attempt(rows: Rows) -> Plan:
        return trimmed(gm, prove(gm, rows, scope, exact), trim_end)

    return best_plan(gm, (functools.partial(attempt, rows) for rows in batches(gm)))


def best_plan(gm: fx.GraphModule, attempts: Iterable[Callable[[], Plan]]) -> Plan:
    """The plan that slices the most collectives, the first of equal ones.

    Raises PassError if no attempt succeeds.
    """
    num_starts = sum(map(collectives.is_start, gm.graph.nodes))
    best: Plan | None = None
    problem = PassError("no data input has a dim, so there is no batch to slice")
    for number, attempt in enumerate(attempts):
        try:
            plan = attempt()
        except PassError as error:
            problem = problem if number else error
            continue
        if best is None or len(plan.sliced_starts) > len(best.sliced_starts):
            best = plan
        if len(best.sliced_starts) == num_starts:
            break
    if best is None:
        raise problem
    return best


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is cut into slices: `size` rows.

    axis: "batch": rows of the inputs, along dim 0, or along dim 1 of inputs that hold a single
        sequence. "token": dim 0 of whatever has as many rows, wherever it is made of data.
    """

    size: sympy.Expr
    axis: str = "batch"


def batches(gm: fx.GraphModule) -> list[Rows]:
    """The rows of data inputs that may be the batch, one per size: dim 0, or where a single
    sequence is all there is, its tokens."""
    found: dict[sympy.Expr, Rows] = {}
    for node in graph.placeholders(gm.graph):
        value = graph.fake_value(node)
        if isinstance(value, torch.Tensor) and value.dim() and not graph.is_module_state(node):
            dim = 1 if value.dim() > 1 and value.shape[0] == 1 else 0
            size = pl.expression(value.shape[dim])
            found.setdefault(size, Rows(size))
    return list(found.values())


def prove(
    gm: fx.GraphModule,
    rows: Rows | None = None,
    scope: Scope | None = None,
    exact: Certificate | None = None,
) -> Plan:
    """A decision per node in `scope` (everything), for slices of `rows` (those of the first data
    input). With a certificate, whatever is not exact by it is refused like whatever is not proven.

    Raises PassError where a value that slices need cannot be had.
    """
    if rows is None:
        found = batches(gm)
        if not found:
            raise PassError("no data input has a dim, so there is no batch to slice")
        rows = found[0]
    return _Prover(gm, rows, scope, exact).plan()


class _Unjoinable(Exception):
    """A node has to be computed once and reads `operands`, rows that cannot be joined."""

    def __init__(self, node: fx.Node, operands: Sequence[fx.Node], refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.node = node
        self.operands = operands
        self.refusal = refusal


class _LeftAlone(Refusal):
    """A node that is not sliced because the user said so, or because another axis has it.

    region: the user's, "" for another axis.
    """

    def __init__(self, reason: str, region: str = "") -> None:
        super().__init__(reason)
        self.region = region


class _Prover:
    """Decides node by node. Starts over with one more exchange left whole, as often as it has to.

    forced: by routing key, why what it routes is not sliced.
    left: by region that the user leaves whole, its first node that could be sliced.
    proven: nodes that some pass could slice; that they are refused now follows from `forced`.
    decisions, placements, refused: of the pass over the graph that is under way, so far.
    data: whole values that the inputs' data is in.
    graded: values that carry a gradient.
    unit: what exact slices are cut in multiples of.
    """

    def __init__(
        self, gm: fx.GraphModule, rows: Rows, scope: Scope | None, exact: Certificate | None
    ) -> None:
        self.gm = gm
        self.exact = exact
        self.graded = exactness.differentiable(gm.graph)
        self.axis, self.batch, self.scope = rows.axis, rows.size, scope
        self.symbols = _input_symbols(gm)
        self.pinned = pinned_nodes(gm.graph)
        self.forced: dict[str, Refused | None] = {}
        self.left: dict[str, Refused] = {}
        self.proven: set[fx.Node] = set()
        self.decisions: dict[fx.Node, Decision] = {}
        self.placements: dict[fx.Node, pl.Placement] = {}
        self.refused: list[Refused] = []
        self.data: set[fx.Node] = set()
        self.unit = 1

    def plan(self) -> Plan:
        while True:
            try:
                self._decide_all()
                break
            except _Unjoinable as problem:
                self._force(problem)
        starts = sliced_starts(self.gm, self.decisions)
        reads = ancestors(n for n in self.gm.graph.nodes if collectives.is_start(n))
        forced = [refused for refused in self.forced.values() if refused]
        known = self.proven | {n for n in self.gm.graph.nodes if self._left_alone(n)}
        barriers = (r for r in self.refused if r.node in reads and r.node not in known)
        return Plan(
            self.axis,
            self.batch,
            self.decisions,
            starts,
            refused=(*forced, *self.refused),
            remarks=tuple(_distinct([*self.left.values(), *forced, *barriers])),
            is_exact=self.exact is not None,
            unit=self.unit,
        )

    def _force(self, problem: _Unjoinable) -> None:
        """Leave the exchanges un-sliced that `problem` depends on, all of them where none is."""
        found = {key for n in problem.operands for key in routing_keys(self.placements[n])}
        found = found - set(self.forced) or {
            key for placement in self.placements.values() for key in routing_keys(placement)
        } - set(self.forced)
        if not found:
            raise PassError(f"{_place_of(problem.node)} cannot be sliced: {problem.refusal.reason}")
        for key in sorted(found):
            if isinstance(problem.refusal, _LeftAlone):
                self.forced[key] = None
                self._tell(problem.node, problem.refusal, EXCHANGE_KEPT)
                continue
            cause = self._first_cause(key, problem)
            if self.scope and self.scope.is_of_other_islands(cause.node):
                self.forced[key] = None
                continue
            self.forced[key] = dataclasses.replace(cause, consequence=EXCHANGE_KEPT)

    def _first_cause(self, key: str, problem: _Unjoinable) -> Refused:
        """The first refusal on the way from the ids to the problem: what the user can change."""
        before = ancestors([problem.node])
        for refused in self.refused:
            reads = {node.name for node in ancestors([refused.node])}
            if refused.node in before and reads & set(key.split(".")):
                return refused
        return Refused(problem.node, problem.refusal.reason, "", problem.refusal.advice)

    def _decide_all(self) -> None:
        self.decisions, self.placements, self.refused, self.data = {}, {}, [], set()
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self._check_output(node)
                continue
            op = Op(node, pl.schema_arguments(node), self.placements, self.batch)
            try:
                decision = self._exact(op, self._decide(op))
            except _LeftAlone as refusal:
                decision = _join(op, refusal)
                self.data.add(node)
                self._tell(node, refusal, _JOINED)
            except Refusal as refusal:
                decision = _join(op, refusal)
                self.data.add(node)
                self.refused.append(Refused(node, refusal.reason, _JOINED, refusal.advice))
            else:
                self.proven.add(node)
            placement = _without_forced(decision.placement, frozenset(self.forced))
            self.placements[node] = placement
            self.decisions[node] = dataclasses.replace(decision, placement=placement)

    def _tell(self, node: fx.Node, refusal: _LeftAlone, consequence: str) -> None:
        region = refusal.region
        if region and (region not in self.left or consequence is EXCHANGE_KEPT):
            self.left[region] = Refused(node, refusal.reason, consequence, "", is_asked=True)

    def _left_alone(self, node: fx.Node) -> _LeftAlone | None:
        """Why a node stays whole: its region says so, or it is not in scope."""
        if region := regions.left_whole(node):
            reason = f"region {region!r} stays whole, as its annotate(slice=False) asks"
            return _LeftAlone(reason, region)
        if self.scope and not self.scope.has(node):
            return _LeftAlone(f"{node.name} is sliced along another axis, if at all")
        return None

    def _check_left_alone(self, op: Op) -> None:
        """Raise for a node that stays whole. Along tokens, what is around an island does anyway."""
        is_cut = self.axis == "batch" or collectives.is_start(op.node)
        is_cut = is_cut or not all(pl.is_joinable(op.place(n)) for n in op.operands)
        refusal = self._left_alone(op.node)
        if refusal and (is_cut or not refusal.region):
            raise refusal

    def _check_output(self, node: fx.Node) -> None:
        blocked = [n for n in node.all_input_nodes if not pl.is_joinable(self.placements[n])]
        if blocked:
            raise _Unjoinable(
                node,
                blocked,
                Refusal(
                    f"the module returns {blocked[0].name}, which is in a slice's own order",
                    "return rows in the order of the batch",
                ),
            )

    def _decide(self, op: Op) -> Decision:
        node = op.node
        if node.op == "placeholder":
            return Decision(self._input_placement(node), once=True)
        if not any(pl.is_sliced(op.place(n)) for n in op.operands):
            return Decision(self._placement_of_whole(op), once=True)
        self._check_left_alone(op)
        _refuse_effects(op)
        if node in self.pinned:
            writer = self.pinned[node]
            raise op.refuse(
                f"makes a value whose storage {writer.name}{_line(writer)} writes in place",
                "use the out-of-place form",
            )
        if f"rows.{node.name}" in self.forced:
            raise op.refuse("picks rows that cannot be kept apart")
        if node.target is operator.getitem:
            return self._item(op)
        rule = pl.rule_for(node)
        if rule is None:
            raise op.refuse(
                "has no placement rule",
                f"register one with overlap.register_rule({_python_name(node)}), as "
                "docs/extending.md shows",
            )
        try:
            op.seen.clear()
            decision = rule(op)
            _check(op, decision, self.symbols)
        except Refusal:
            raise
        except Exception as error:  # a rule that did not foresee a program proves nothing
            raise op.refuse(
                f"is not proven: its placement rule stopped with {type(error).__name__}: {error}"
            ) from error
        return decision

    def _exact(self, op: Op, decision: Decision) -> Decision:
        """With the gradients that become sums. Raises Refusal where bits change and must not."""
        summed = exactness.summed(op, decision, self.graded)
        decision = dataclasses.replace(decision, summed=summed)
        if self.exact is not None:
            problem = exactness.obstacle(op, decision, self.exact, self.graded)
            if problem is not None:
                raise problem
            if not decision.once and pl.is_sliced(decision.placement):
                self.unit = max(self.unit, exactness.least_rows(op, self.exact, self.graded))
        return decision

    def _item(self, op: Op) -> Decision:
        """A part of a value that was computed once is whole as well, and cut where it is read."""
        source, at = op.node.args
        match op.place(source):
            case Many(items):
                return Decision(items[at], once=self.decisions[source].once)  # pyright: ignore
        raise op.refuse("picks from a value whose parts are not known")

    def _input_placement(self, node: fx.Node) -> pl.Placement:
        value = graph.fake_value(node)
        if not isinstance(value, torch.Tensor) or graph.is_module_state(node):
            return pl.WHOLE
        self.data.add(node)
        leads = [0] if self.axis == "token" or not value.dim() or value.shape[0] != 1 else [0, 1]
        for dim in leads:
            if dim < value.dim() and pl.same(pl.expression(value.shape[dim]), self.batch):
                return Split(dim, Base(sympy.Integer(1)))
        return pl.WHOLE

    def _placement_of_whole(self, op: Op) -> pl.Placement:
        """Of a node that reads no rows. Along tokens, it may make some: whatever is made of data
        and has as many rows can be cut into them."""
        if self.data.isdisjoint(op.operands):
            return _whole(op)
        self.data.add(op.node)
        value = graph.fake_value(op.node)
        is_rows = isinstance(value, torch.Tensor) and value.dim() > 0
        if self.axis == "token" and is_rows and pl.same(op.shape[0], self.batch):
            return Split(0, Base(sympy.Integer(1)))
        return _whole(op)


def _python_name(node: fx.Node) -> str:
    """What a call calls, as users write it."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return f"torch.ops.{pl.operator_name(node)}" if is_operator else pl.operator_name(node)


def _distinct(refused: Iterable[Refused]) -> Iterator[Refused]:
    """One remark per node and reason: several keys may be refused for one."""
    seen: dict[tuple[fx.Node, str], Refused] = {}
    for item in refused:
        seen.setdefault((item.node, item.reason), item)
    return iter(seen.values())


def _input_symbols(gm: fx.GraphModule) -> frozenset[sympy.Symbol]:
    """The symbols that stand for a size of an input."""
    symbols: set[sympy.Symbol] = set()
    for node in graph.placeholders(gm.graph):
        value = graph.fake_value(node)
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        exprs = (pl.expression(s) for s in sizes if isinstance(s, torch.SymInt))
        symbols.update(e for e in exprs if isinstance(e, sympy.Symbol))
    return frozenset(symbols)


# --- what an operator may not do to a slice -------------------------------------------------------


def _refuse_effects(op: Op) -> None:
    """Raise for a node that a slice may not run, whatever its rule says."""
    node = op.node
    if _written_operands(node):
        raise op.refuse(
            "writes in place, into a value that is read elsewhere", "use the out-of-place form"
        )
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        if "mutation" in op.name or "triton" in op.name:
            raise PassError(
                f"{op.name} ({graph.source_line(node)}) writes in place what it does not name"
            )
        raise op.refuse("runs a graph of its own, which is not looked into")


def _check(op: Op, decision: Decision, symbols: frozenset[sympy.Symbol]) -> None:
    """Hold a decision to what every right one satisfies: a rule that forgot a case refuses.

    Every sliced operand that reaches a slice's call was looked at; the sliced dim has the size that
    its rows say; sums and exact integers are kept in a dtype that holds them.
    """
    if decision.once or decision.first_slice or decision.drop:
        return
    reached = {name: decision.replace.get(name, arg) for name, arg in op.arguments.items()}
    for node in _nodes_in(reached.values()):
        if node not in op.seen and pl.is_sliced(op.place(node)):
            raise op.refuse(f"uses {node.name}, which differs between slices, where it may not")
    value = graph.fake_value(op.node)
    match decision.placement:
        case Many(items):
            values = list(value) if isinstance(value, list | tuple) else [value]
            if len(values) != len(items):
                raise op.refuse(f"has {len(values)} results, and its rule says {len(items)}")
        case placement:
            values, items = [value], (placement,)
    for item, result in zip(items, values, strict=True):
        problem = pl.contradiction(item, result, op.batch, symbols)
        if problem:
            raise op.refuse(problem)


def _nodes_in(arguments: Iterable[Any]) -> Iterator[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(tuple(arguments), found.append)
    return iter(found)


def pinned_nodes(graph_: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Nodes whose storage is written in place, with a node that writes it: slices of such a value
    would be copies that miss the write."""
    writers = {
        storage: node
        for node in graph_.nodes
        for operand in _written_operands(node)
        for storage in graph.storages_of(operand)
    }
    owners = ((node, storage) for node in graph_.nodes for storage in graph.storages_of(node))
    return {node: writers[storage] for node, storage in owners if storage in writers}


def _written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that the schema of a call says it writes."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    arguments = pl.schema_arguments(node)
    written = [
        arguments[argument.name]
        for argument in node.target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return list(_nodes_in(written))


# --- values that are the same in every slice ------------------------------------------------------

_CONSTANT_OPS = (
    aten.view, aten.reshape, aten.repeat, aten.flatten, aten.to, aten._to_copy, aten.unsqueeze,
    aten.expand, aten.remainder, aten.floor_divide, aten.t, aten.contiguous, aten.clone,
)  # fmt: skip
_MAX_CONSTANT = 4096


def _whole(op: Op) -> pl.Whole:
    try:
        constant = _constant(op)
    except Exception:  # only knowledge is lost
        constant = None
    return pl.Whole(constant, pl.fill_of(op.node))


def _constant(op: Op) -> tuple[int, ...] | None:
    """Elements of a small integer tensor that is known while compiling, such as
    `arange(E).repeat(n)`, in row-major order."""
    node = op.node
    value = graph.fake_value(node)
    if not isinstance(value, torch.Tensor) or not all(s.is_Integer for s in op.shape):
        return None
    if value.dtype not in (torch.int32, torch.int64) or pl.product(op.shape) > _MAX_CONSTANT:
        return None
    if graph.is_call(node, aten.arange):
        start, end, step = op.get("start", 0), op.get("end"), op.get("step", 1)
        is_literal = all(isinstance(n, int) for n in (start, end, step))
        return tuple(range(start, end, step)) if is_literal else None
    if not graph.is_call(node, *_CONSTANT_OPS) or len(op.operands) != 1:
        return None
    source = op.place(op.operands[0])
    if not isinstance(source, pl.Whole) or source.constant is None:
        return None
    shape = [int(size) for size in pl.shape_of(op.operands[0])]
    tensor = torch.tensor(source.constant, dtype=torch.int64).reshape(shape)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda _: tensor)
    return tuple(node.target(*args, **kwargs).reshape(-1).tolist())  # pyright: ignore


# --- what is computed once ------------------------------------------------------------------------


def _join(op: Op, refusal: Refusal) -> Decision:
    """Compute the node once, on joined operands; rows in batch order are sliced again after it."""
    blocked = [n for n in op.operands if not pl.is_joinable(op.place(n))]
    if blocked:
        raise _Unjoinable(op.node, blocked, refusal)
    value = graph.fake_value(op.node)
    if isinstance(value, list | tuple):
        placement: pl.Placement = Many(tuple(_sliced_again(op, item) for item in value))
    else:
        placement = _sliced_again(op, value)
    return Decision(placement, once=True)


def _sliced_again(op: Op, value: Any) -> pl.Placement:
    """Where a whole result is cut for the slices that read it: where an operand was."""
    if not isinstance(value, torch.Tensor):
        return pl.WHOLE
    shape = [pl.expression(size) for size in value.shape]
    for operand in op.operands:
        match op.place(operand):
            case Split(dim, Base(per_batch_row)) if dim < len(shape) and pl.same(
                shape[dim], per_batch_row * op.batch
            ):
                return Split(dim, Base(per_batch_row))
    return pl.WHOLE


_KEY = re.compile(r"hist:([^:]+)")


def routing_keys(placement: pl.Placement) -> set[str]:
    """The routing keys that a placement depends on."""
    match placement:
        case Split(_, pl.Sorted(_, key)) | Split(_, pl.Received(_, _, pl.Sorted(_, key))):
            return {key}
        case Split(_, pl.Picked(mask)):
            return {f"rows.{mask}"}
        case Split(_, pl.Length(length)):
            return set(_KEY.findall(length.base))
        case Split(_, _, pl.RowIndex(pl.Sorted(_, key))):
            return {key}
        case pl.Counts(form) | pl.Scalar(form):
            return set(_KEY.findall(form.base))
        case Many(items):
            return {key for item in items for key in routing_keys(item)}
        case _:
            return set()


def _without_forced(placement: pl.Placement, forced: frozenset[str]) -> pl.Placement:
    """Ids whose exchange must stay un-sliced are plain data: what is routed by them is joined."""
    match placement:
        case Split(dim, rows, pl.Ids(key)) | Split(dim, rows, pl.OneHot(pl.Ids(key))) if (
            key in forced
        ):
            return Split(dim, rows)
        case Many(items):
            return Many(tuple(_without_forced(item, forced) for item in items))
        case _:
            return placement


# --- the region -----------------------------------------------------------------------------------


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def sliced_starts(gm: fx.GraphModule, decisions: dict[fx.Node, Decision]) -> tuple[str, ...]:
    return tuple(
        node.name
        for node in gm.graph.nodes
        if collectives.is_start(node)
        and not decisions[node].once
        and pl.is_sliced(decisions[node].placement)
    )


def trimmed(gm: fx.GraphModule, plan: Plan, trim_end: bool = True) -> Plan:
    """Leave out of the region what gains nothing: lookups of inputs before it; with `trim_end`,
    behind its last collective whatever is whole already, and products that would enlarge what has
    to be joined."""
    before_start = ancestors(n for n in gm.graph.nodes if collectives.is_start(n))
    result = dict(plan.decisions)

    def is_whole(node: fx.Node) -> bool:
        return result[node].once or not pl.is_sliced(result[node].placement)

    for node, decision in plan.decisions.items():
        sliced = [n for n in node.all_input_nodes if pl.is_sliced(plan.decisions[n].placement)]
        if decision.once or not isinstance(decision.placement, Split):
            continue
        if not all(pl.is_joinable(plan.decisions[n].placement) for n in (node, *sliced)):
            continue
        all_whole = all(is_whole(n) for n in sliced)
        is_lookup = all_whole and graph.is_call(node, aten.embedding)
        is_tail = trim_end and node not in before_start
        if is_lookup or (is_tail and (all_whole or _enlarges(node, sliced))):
            result[node] = Decision(decision.placement, once=True)
    return dataclasses.replace(plan, decisions=result, sliced_starts=sliced_starts(gm, result))


def _enlarges(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    if not graph.is_call(node, *_HEAVY):
        return False
    inputs = sum(pl.product(pl.shape_of(n)) for n in operands)
    ratio = sympy.cancel(pl.product(pl.shape_of(node)) / inputs) if inputs != 0 else sympy.nan
    return bool(ratio.is_number and ratio > 1)


def _place_of(node: fx.Node) -> str:
    return f"{graph.module_path(node) or node.name}{_line(node)}"


def _line(node: fx.Node) -> str:
    line = graph.source_line(node)
    return f" ({line})" if line else ""
