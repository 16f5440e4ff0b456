"""How long a step would take under a plan, before anything is written: plan to tasks, played.

    plan + slices + costs of the program as written --forward_of--> tasks of the forward
    the same mirrored: a gradient for what a task read, weight gradients beside --> of the backward

They go to the scheduler that will order the real graphs, and the simulator plays its best order. A
task that slices share keeps its cost; one that runs once per slice has its part of the flops and of
the rows moved, and reads the same weights as the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import fx

from overlap import collectives, cost, graph, islands, schedule, slicing
from overlap import placement as pl
from overlap.cost import Costs, Sizes
from overlap.hardware import Profile
from overlap.simulate import Machine, Program, TaskKind
from overlap.slicing import Plan

_SHORT_US = 1e-3


@dataclasses.dataclass(frozen=True)
class Task:
    """One piece of work of the forward.

    us: on the compute queue, the link or the host, by kind.
    deps: what it reads, as indices of tasks.
    group, link: of a start, else "". start: the start that a wait is for, else -1.
    is_floating: whether a gradient flows back through it.
    weights: how many operands are made of parameters alone: each wants a gradient.
    """

    kind: TaskKind
    us: float
    deps: tuple[int, ...]
    group: str = ""
    link: str = ""
    start: int = -1
    is_floating: bool = False
    weights: int = 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """What costs are taken from: of the program as written, at nominal sizes."""

    costs: Costs
    sizes: Sizes
    profile: Profile
    group_size: Callable[[str], int]

    @classmethod
    def of(
        cls,
        gm: fx.GraphModule,
        profile: Profile,
        group_size: Callable[[str], int],
        skew: float = 1.0,
    ) -> Setting:
        sizes = cost.nominal_sizes(gm, profile.nominal_size).skewed(skew)
        return cls(cost.estimate(gm, profile, group_size, sizes), sizes, profile, group_size)

    def latency_us(self, start: fx.Node) -> float:
        """What a collective takes, however little it moves."""
        num_ranks = self.group_size(collectives.group_of(start))
        return self.profile.latency_of(collectives.kind_of(start).value, num_ranks)


def step_us(
    gm: fx.GraphModule,
    plan: Plan | None,
    slices: int,
    setting: Setting,
    is_trained: bool = True,
    is_whole_step: bool = False,
) -> float:
    """Predicted time in microseconds of the forward of `gm`, and of its backward if `is_trained`.

    plan: what slicing makes of each node; None for the program as written.
    is_whole_step: forward and backward are one graph, so that one hides communication of the other.
    """
    tasks = forward_of(gm, plan, slices, setting)
    parts = [tasks]
    if is_trained:
        parts = [_step(tasks)] if is_whole_step else [tasks, _backward(tasks)]
    machine = Machine.of(setting.profile)
    programs = [_program(part) for part in parts if part]
    return sum(
        schedule.schedule(program, machine, search_steps=0).after.makespan_us
        for program in programs
    )


def forward_of(gm: fx.GraphModule, plan: Plan | None, slices: int, setting: Setting) -> list[Task]:
    """The tasks of the forward, in the order in which they would be written."""
    return _Writer(gm, plan, slices, setting).tasks()


class _Writer:
    """Lists the tasks of a plan, in the order in which the emitters write nodes.

    parts: by node that runs once per slice, the tasks that make each slice's value.
    whole: by any other node, the tasks that make its value.
    owed_us: host time of nodes without work, views and sizes, where the host runs the kernels: the
        next task has it.
    """

    def __init__(
        self, gm: fx.GraphModule, plan: Plan | None, slices: int, setting: Setting
    ) -> None:
        self.gm, self.plan, self.slices, self.setting = gm, plan, slices, setting
        self.list: list[Task] = []
        self.parts: dict[fx.Node, list[tuple[int, ...]]] = {}
        self.whole: dict[fx.Node, tuple[int, ...]] = {}
        self.joined: dict[fx.Node, tuple[int, ...]] = {}
        self.states = _made_of_parameters(gm)
        self.owed_us = 0.0

    def tasks(self) -> list[Task]:
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.whole[node] = ()
            elif node.op == "output":
                self._add(Task(TaskKind.FREE, 0.0, self._reads(node)))
            elif self.plan is None or not self._runs_per_slice(node):
                self.whole[node] = self._write(node, self._reads(node), None)
            else:
                self.parts[node] = self._write_parts(node)
        return self.list

    def _runs_per_slice(self, node: fx.Node) -> bool:
        assert self.plan is not None
        decision = self.plan.decisions[node]
        is_packed = self.plan.axis == "token" and isinstance(decision.placement, pl.Counts)
        if is_packed and (collectives.is_start(node) or collectives.is_wait(node)):
            return False
        return self.plan.is_sliced(node) and not decision.first_slice and not decision.drop

    def _write_parts(self, node: fx.Node) -> list[tuple[int, ...]]:
        assert self.plan is not None
        live = [i for i in range(self.slices) if self._has_rows(node, i)]
        return [
            self._write(node, self._reads(node, i), (i, len(live))) if i in live else ()
            for i in range(self.slices)
        ]

    def _has_rows(self, node: fx.Node, index: int) -> bool:
        """Along experts, an operator on the rows of some experts has its work in their slices."""
        assert self.plan is not None
        placement = self.plan.decisions[node].placement
        here = islands.experts_of(placement)
        keys = slicing.routing_keys(placement) & self.plan.islands.keys()
        if not here or not keys:
            return True
        return not here.isdisjoint(self.plan.islands[min(keys)].experts_of(index, self.slices))

    # what a task reads

    def _reads(self, node: fx.Node, index: int | None = None) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for source in node.all_input_nodes:
            found.update(dict.fromkeys(self._value(source, index)))
        return tuple(sorted(found))

    def _value(self, source: fx.Node, index: int | None) -> tuple[int, ...]:
        if source not in self.parts:
            return self.whole[source]
        assert self.plan is not None
        if index is not None and not islands.is_returned(source, self.plan):
            return self.parts[source][index]
        return self._join(source)

    def _join(self, node: fx.Node) -> tuple[int, ...]:
        """A copy that puts the slices side by side."""
        if node not in self.joined:
            deps = tuple(sorted({task for part in self.parts[node] for task in part}))
            us = 2 * self._bytes(node) / self.setting.profile.memory_bytes_per_us()
            is_floating = _is_floating(node)
            self.joined[node] = (
                (self._add(Task(TaskKind.COMPUTE, us, deps, is_floating=is_floating)),)
                if us > _SHORT_US
                else deps
            )
        return self.joined[node]

    # what a task costs

    def _write(
        self, node: fx.Node, reads: tuple[int, ...], part: tuple[int, int] | None
    ) -> tuple[int, ...]:
        """The task of a node, or of one of so many parts of it; what it reads where it is none."""
        is_floating = _is_floating(node)
        node_cost = self.setting.costs.of(node)
        num_parts = 1 if part is None else part[1]
        if collectives.is_start(node):
            latency_us = min(self.setting.latency_us(node), node_cost.collective_us)
            us = latency_us + (node_cost.collective_us - latency_us) / num_parts
            group = collectives.group_of(node)
            start = Task(TaskKind.START, us, reads, group, node_cost.link, is_floating=is_floating)
            return (self._add(start),)
        if collectives.is_wait(node) and len(reads) == 1:
            [start] = reads
            wait = Task(TaskKind.WAIT, 0.0, reads, start=start, is_floating=is_floating)
            return (self._add(wait),)
        if node_cost.is_host_read:
            return (self._add(Task(TaskKind.HOST_READ, node_cost.compute_us, reads)),)
        us = self._compute_us(node, num_parts)
        if us <= _SHORT_US:
            if not self.setting.profile.is_stream:
                self.owed_us += self.setting.profile.launch_us
            return reads
        us, self.owed_us = us + self.owed_us, 0.0
        is_product = cost.is_matmul(node)
        weights = sum(n in self.states for n in node.all_input_nodes) if is_product else 0
        return (
            self._add(Task(TaskKind.COMPUTE, us, reads, is_floating=is_floating, weights=weights)),
        )

    def _compute_us(self, node: fx.Node, num_parts: int) -> float:
        """Of one part: its share of the work, and whole operands read in full."""
        us = self.setting.costs.of(node).compute_us
        if num_parts == 1 or us == 0:
            return us
        rate = self.setting.profile.memory_bytes_per_us()
        by_experts = self.plan is not None and self.plan.axis == "expert"
        shared = (
            0.0
            if by_experts
            else float(sum(self._bytes(n) for n in node.all_input_nodes if n not in self.parts))
        )
        moved = cost.work_of(node, self.setting.sizes).num_bytes
        shared = min(shared, moved)
        return max(us / num_parts, (shared + (moved - shared) / num_parts) / rate)

    def _bytes(self, node: fx.Node) -> int:
        return sum(self.setting.costs.of(node).result_bytes)

    def _add(self, task: Task) -> int:
        self.list.append(task)
        return len(self.list) - 1


def _made_of_parameters(gm: fx.GraphModule) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        sources = node.all_input_nodes
        is_source = node.op == "placeholder" and graph.is_module_state(node)
        if is_source or (sources and node.op == "call_function" and found.issuperset(sources)):
            found.add(node)
    return found


def _is_floating(node: fx.Node) -> bool:
    value = graph.fake_value(node)
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def _backward(tasks: Sequence[Task]) -> list[Task]:
    return _ended(_mirrored(tasks))


def _step(tasks: Sequence[Task]) -> list[Task]:
    """Forward and backward; a gradient reads what the forward saved."""
    return _ended([*tasks, *_mirrored(tasks, len(tasks))])


def _mirrored(tasks: Sequence[Task], behind: int = 0) -> list[Task]:
    """The backward: every task that a gradient flows through, in reverse, reading the gradients of
    what it made. A product has a second one for each weight, which nothing waits for.

    behind: how many tasks come before these; with any, a task reads its own forward's.
    """
    users: list[list[int]] = [[] for _ in tasks]
    waits: dict[int, int] = {}
    for index, task in enumerate(tasks):
        if task.start >= 0:
            waits[task.start] = index
        for dep in task.deps:
            users[dep].append(index)
    result: list[Task] = []
    gradient: dict[int, int] = {}

    def add(task: Task) -> int:
        result.append(task)
        return behind + len(result) - 1

    for index in reversed(range(len(tasks))):
        task = tasks[index]
        if not task.is_floating:
            continue
        found = {gradient[user] for user in users[index] if user in gradient}
        deps = tuple(sorted(found | ({index} if behind else set())))
        match task.kind:
            case TaskKind.WAIT:
                start = tasks[task.start]
                new = dataclasses.replace(start, deps=deps)
            case TaskKind.START if index in waits:
                began = gradient[waits[index]]
                new = Task(TaskKind.WAIT, 0.0, (began,), start=began)
            case TaskKind.START:
                continue
            case _:
                for _ in range(task.weights):
                    add(Task(TaskKind.COMPUTE, task.us, deps))
                new = Task(task.kind, task.us, deps)
        gradient[index] = add(new)
    return result


def _ended(tasks: list[Task]) -> list[Task]:
    """With the graph's output behind everything."""
    return [*tasks, Task(TaskKind.FREE, 0.0, tuple(range(len(tasks))))] if tasks else []


def _program(tasks: Sequence[Task]) -> Program:
    link_of = {task.group: task.link for task in tasks if task.group}
    index = {name: i for i, name in enumerate(link_of)}
    links = list(dict.fromkeys(link_of.values()))
    return Program(
        names=tuple(f"task {i}" for i in range(len(tasks))),
        kinds=tuple(task.kind for task in tasks),
        durations=tuple(task.us for task in tasks),
        groups=tuple(index[task.group] if task.group else -1 for task in tasks),
        group_names=tuple(link_of),
        links=tuple(links.index(link) for link in link_of.values()),
        starts=tuple(task.start for task in tasks),
        deps=tuple(task.deps for task in tasks),
        storages=(),
    )
