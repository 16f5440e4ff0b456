"""schedule: nodes move so that collectives are in flight while others compute.

    before   a = start(x0);  wa = wait(a);  y = f(wa);  b = start(x1);  wb = wait(b);  z = f(wb)
    after    a = start(x0);  b = start(x1);  wa = wait(a);  y = f(wa);  wb = wait(b);  z = f(wb)

Why it is correct: the new order keeps every dependency of data and effects. The order of a group's
starts depends on the structure of the graph alone, not even on its costs: a rank whose batch leaves
a slice one row sees other sizes than its peers, and has to start the same collectives all the same.

Cost: values live longer; `memory_budget` caps the peak. Never worse than program order in the
scheduler's own simulation.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

from torch import fx

from overlap import collectives, cost, graph, pricing, schedule, simulate
from overlap.cost_table import CostTable
from overlap.graph import Phase
from overlap.hardware import Profile
from overlap.pipeline import Context, Effect


@dataclasses.dataclass(frozen=True)
class MemoryCap:
    """Bytes that the schedule's peak may reach; None for no limit."""

    num_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """What the last run decided, for the report. sources: of the costs, if from a table."""

    program: simulate.Program
    machine: simulate.Machine
    schedule: schedule.Schedule
    sources: cost.Sources | None = None

    @property
    def start_order(self) -> tuple[str, ...]:
        """The names of the collectives, in the order in which they start."""
        program = self.program
        is_start = simulate.TaskKind.START
        return tuple(program.names[i] for i in self.schedule.order if program.kinds[i] is is_start)


@dataclasses.dataclass(frozen=True)
class Schedule:
    name: str = "schedule"
    effect: Effect = Effect.REORDER
    requires: Phase = Phase.NORMALIZED
    ensures: Phase = Phase.SCHEDULED

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        profile, table = ctx.fact(Profile), ctx.fact_or_none(CostTable)
        sizes = ctx.fact_or_none(cost.Sizes)
        costs = pricing.estimate(gm, profile, ctx.group_size, sizes, table)
        program = self._settle_starts(gm, costs)
        machine = simulate.Machine.measured(table) if table else simulate.Machine.of(profile)
        result = schedule.schedule(program, machine, ctx.fact(MemoryCap).num_bytes)
        if costs.sources and costs.sources.formulas:
            ctx.remark("note", f"not in the cost table: {costs.sources}; measure again")
        for reason in result.reasons:
            ctx.remark("skipped", reason)
        nodes = list(gm.graph.nodes)
        graph.reorder(gm.graph, [nodes[i] for i in result.order])
        ctx.provide(Scheduled(program, machine, result, costs.sources))

    def _settle_starts(self, gm: fx.GraphModule, costs: cost.Costs) -> simulate.Program:
        """The program with every group's starts in the order that all ranks keep."""
        program = simulate.extract(gm, costs)
        order = _program_order(_with_start_order(program, start_order(gm)))
        if order is not None and order != list(range(len(order))):
            nodes = list(gm.graph.nodes)
            graph.reorder(gm.graph, [nodes[i] for i in order])
            program = simulate.extract(gm, costs)
        in_order: dict[str, list[int]] = {}
        for i, group in enumerate(program.groups):
            if group >= 0:
                in_order.setdefault(program.group_names[group], []).append(i)
        return dataclasses.replace(program, deps=_with_start_order(program, in_order))


def start_order(gm: fx.GraphModule) -> dict[str, list[int]]:
    """Per group, the positions of its starts in the order in which every rank runs them.

    Collectives come in order of how many precede them on a path, then of which was preceded first,
    then of the program. One that moves integers prepares another, such as an exchange of counts,
    and comes right before it.

    Where forward and backward share a graph, the slice whose forward is done first begins its
    backward; as autograd adds up gradients from the last slice to the first, the last goes first.
    """
    nodes = list(gm.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    turns = _turns(nodes)
    prepares: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        own = turns.get(node, len(nodes))
        prepares[node] = min([own, *(prepares[user] for user in node.users)])
    groups: dict[str, list[int]] = {}
    starts = [node for node in nodes if collectives.is_start(node)]
    for node in sorted(starts, key=lambda n: (prepares[n], _moves_data(n), position[n])):
        groups.setdefault(collectives.group_of(node), []).append(position[node])
    return groups


def _turns(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The collectives of data, and their places in the order of all of them."""
    by_depth: dict[int, list[fx.Node]] = {}
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        before = max((depth[source] for source in node.all_input_nodes), default=0)
        depth[node] = before + _moves_data(node)
        by_depth.setdefault(depth[node], []).append(node)
    is_shared = len({graph.is_backward(node) for node in nodes if _moves_data(node)}) == 2

    def turn(start: fx.Node) -> tuple[int, int]:
        before = max((latest[source] for source in start.all_input_nodes), default=-1)
        return before, -(graph.tag_of(start).slice or 0) if is_shared else 0

    turns: dict[fx.Node, int] = {}
    latest: dict[fx.Node, int] = {}  # the turn of the last collective up to here on any path
    for _, level in sorted(by_depth.items()):
        for start in sorted(filter(_moves_data, level), key=turn):
            turns[start] = latest[start] = len(turns)
        for node in level:
            if node not in turns:
                latest[node] = max((latest[n] for n in node.all_input_nodes), default=-1)
    return turns


def _moves_data(node: fx.Node) -> bool:
    return collectives.is_start(node) and collectives.operand_of(node).is_floating_point()


def _with_start_order(
    program: simulate.Program, groups: dict[str, list[int]]
) -> tuple[tuple[int, ...], ...]:
    """The dependencies of `program` with each group's starts in a chain."""
    deps = list(program.deps)
    for starts in groups.values():
        for before, after in itertools.pairwise(starts):
            deps[after] = tuple(sorted({*deps[after], before}))
    return tuple(deps)


def _program_order(deps: Sequence[Sequence[int]]) -> list[int] | None:
    """Positions so that dependencies come first, else in their own order; None for a cycle."""
    users: list[list[int]] = [[] for _ in deps]
    num_missing = [len(before) for before in deps]
    for task, before in enumerate(deps):
        for dep in before:
            users[dep].append(task)
    ready = [task for task, missing in enumerate(num_missing) if missing == 0]
    order: list[int] = []
    while ready:
        task = heapq.heappop(ready)
        order.append(task)
        for user in users[task]:
            num_missing[user] -= 1
            if num_missing[user] == 0:
                heapq.heappush(ready, user)
    return order if len(order) == len(deps) else None
