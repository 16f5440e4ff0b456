"""Play a graph on its resources: a timeline, what of the communication is exposed, peak memory.

    graph + costs --extract--> Program --simulate(order, machine)--> Timeline

A `Program` is plain tuples, taken from the graph once; a position in program order is its only
name for a node. Everything that orders two nodes is in its `deps`: data, mutation of a storage,
random numbers, other effects. What the order of one group's starts is, it leaves open.

The machine:

- one compute queue, which runs kernels in order;
- a FIFO per group; groups of one link share its rate evenly while they are in flight together;
- a host that issues nodes in order with a launch time each. On a stream (`is_stream`) it runs
  ahead: a start waits for the compute issued before it, a wait holds up the stream but not the
  host, a host read drains the stream and stalls issue. Without one, the host *is* the compute
  queue: launch time and waits are its own;
- compute beside communication takes 1 + contention times as long.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from overlap import collectives, graph
from overlap.collectives import Kind
from overlap.cost import Costs
from overlap.cost_table import CostTable
from overlap.errors import PassError
from overlap.hardware import Profile

_aten = torch.ops.aten
_CHECKS = (
    *graph.ASSERTIONS,
    _aten._assert_tensor_metadata,
    _aten.sym_constrain_range,
    _aten.sym_constrain_range_for_size,
)
_EPSILON_US = 1e-9


class TaskKind(enum.IntEnum):
    """What a task occupies: nothing, the compute queue, a link, ... ."""

    FREE = 0
    COMPUTE = 1
    START = 2
    WAIT = 3
    HOST_READ = 4


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the simulator needs to know of a `hardware.Profile`; see the module's list."""

    is_stream: bool = False
    launch_us: float = 0.0
    contention: float = 0.0

    @classmethod
    def of(cls, profile: Profile) -> Machine:
        return cls(profile.is_stream, profile.launch_us, profile.contention)

    @classmethod
    def measured(cls, table: CostTable) -> Machine:
        """The machine that a cost table was measured on: a launch is part of each call's time."""
        return cls(contention=table.contention)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Memory that one task makes and others use.

    num_bytes: its size.
    definer: position of the task that makes it (of the placeholder, for an input that is freed).
    uses: positions of the tasks that touch it, in program order, the definer not among them. The
        wait of a collective uses its operand: a buffer in flight may not be freed.
    is_output: alive to the end.
    """

    num_bytes: int
    definer: int
    uses: tuple[int, ...]
    is_output: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph as the simulator and the scheduler see it; lists run by position in program order.

    durations: microseconds on the compute queue, the link or the host, by kind.
    groups: index of a start's group in `group_names`, -1 for any other task.
    links: for each group, the index of its link.
    starts: for a wait, the position of its start, else -1.
    deps: positions that must come before, ascending.
    storages: memory that is counted; inputs that the caller keeps are not.
    num_inputs: so many first tasks are the graph's inputs and stay first; the last one, the
        graph's output, stays last.
    issue_us: host time to issue each task, on top of the machine's launch time; empty: none.
    """

    names: tuple[str, ...]
    kinds: tuple[TaskKind, ...]
    durations: tuple[float, ...]
    groups: tuple[int, ...]
    group_names: tuple[str, ...]
    links: tuple[int, ...]
    starts: tuple[int, ...]
    deps: tuple[tuple[int, ...], ...]
    storages: tuple[Storage, ...]
    num_inputs: int = 0
    issue_us: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def total_us(self, kind: TaskKind) -> float:
        return sum(d for d, k in zip(self.durations, self.kinds, strict=True) if k is kind)


def extract(gm: fx.GraphModule, costs: Costs, freed_inputs: Iterable[str] | None = None) -> Program:
    """The program of `gm` under `costs`.

    freed_inputs: names of the placeholders whose memory is freed at their last use. By default,
    in a backward graph every input that is not a `primals_*`: saved activations and tangents.
    """
    nodes = list(gm.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    groups = {collectives.group_of(n): None for n in nodes if collectives.is_start(n)}
    group_index = {name: i for i, name in enumerate(groups)}
    group_link = {
        collectives.group_of(n): costs.of(n).link for n in nodes if collectives.is_start(n)
    }
    link_index = {name: i for i, name in enumerate(dict.fromkeys(group_link.values()))}
    memory = _Memory(nodes, position)
    freed = set(_freed_inputs(nodes) if freed_inputs is None else freed_inputs)
    issue_us = tuple(costs.of(node).issue_us for node in nodes)

    return Program(
        names=tuple(node.name for node in nodes),
        kinds=tuple(_kind(node, costs) for node in nodes),
        durations=tuple(costs.of(n).compute_us + costs.of(n).collective_us for n in nodes),
        groups=tuple(
            group_index[collectives.group_of(node)] if collectives.is_start(node) else -1
            for node in nodes
        ),
        group_names=tuple(groups),
        links=tuple(link_index[group_link[name]] for name in groups),
        starts=tuple(position[start] if (start := _start_of(n)) else -1 for n in nodes),
        deps=_dependencies(nodes, position, memory),
        storages=tuple(memory.counted(costs, freed)),
        num_inputs=len(graph.placeholders(gm.graph)),
        issue_us=issue_us if any(issue_us) else (),
    )


def _kind(node: fx.Node, costs: Costs) -> TaskKind:
    if collectives.is_start(node):
        return TaskKind.START
    if _start_of(node):
        return TaskKind.WAIT
    if costs.of(node).is_host_read:
        return TaskKind.HOST_READ
    return TaskKind.COMPUTE if costs.of(node).compute_us > 0 else TaskKind.FREE


def _start_of(node: fx.Node) -> fx.Node | None:
    """The start that a wait is for; None for any other node."""
    return collectives.start_of(node) if collectives.is_wait(node) else None


def _freed_inputs(nodes: Sequence[fx.Node]) -> list[str]:
    inputs = [node.name for node in nodes if node.op == "placeholder"]
    if not any(name.startswith("tangents") for name in inputs):
        return []
    return [name for name in inputs if not name.startswith("primals")]


class _Memory:
    """Which storages each node makes, touches and writes; a storage is a small integer.

    Two values share a storage where their fake tensors do, where a schema says so, and where a
    wait returns what its start put in flight (its fake tensor is a fresh one).
    """

    def __init__(self, nodes: Sequence[fx.Node], position: dict[fx.Node, int]) -> None:
        self.definer: list[int] = []
        self.result_index: list[int] = []
        self.outputs: dict[int, None] = {}
        self.results: list[tuple[int, ...]] = []
        self.touched: list[tuple[int, ...]] = []
        self.written: list[tuple[int, ...]] = []
        self._nodes = nodes
        self._by_fake: dict[int, int] = {}
        self._position = position
        for i, node in enumerate(nodes):
            self._add(i, node)

    def _add(self, i: int, node: fx.Node) -> None:
        touched = dict.fromkeys(s for n in node.all_input_nodes for s in self.of(n))
        written: dict[int, None] = dict.fromkeys(
            s for n in _written_nodes(node) for s in self.of(n)
        )
        if node.op == "output":
            self.outputs = touched
        start = _start_of(node)
        if start is not None:
            begun = self._position[start]
            touched |= dict.fromkeys(self.touched[begun])
            written |= dict.fromkeys(self.written[begun])
        self.touched.append(tuple(touched))
        self.written.append(tuple(written))
        self.results.append(self._results(i, node))

    def _results(self, i: int, node: fx.Node) -> tuple[int, ...]:
        if node.op == "output":
            return ()
        if collectives.is_wait(node):
            return self.of(collectives.awaited(node))
        aliased = _aliased_node(node)
        if aliased is not None and len(self.of(aliased)) == 1:
            return self.of(aliased)
        tensors = enumerate(graph.tensors_of(graph.fake_value(node)))
        return tuple(dict.fromkeys(self._storage(i, index, t) for index, t in tensors))

    def _storage(self, definer: int, result_index: int, tensor: torch.Tensor) -> int:
        key = graph.storage_of(tensor)
        if key not in self._by_fake:
            self._by_fake[key] = len(self.definer)
            self.definer.append(definer)
            self.result_index.append(result_index)
        return self._by_fake[key]

    def of(self, node: fx.Node) -> tuple[int, ...]:
        return self.results[self._position[node]]

    def counted(self, costs: Costs, freed_inputs: set[str]) -> Iterator[Storage]:
        uses: list[list[int]] = [[] for _ in self.definer]
        for i, node in enumerate(self._nodes):
            for storage in self.touched[i] if node.op != "output" else ():
                uses[storage].append(i)
        for storage, definer in enumerate(self.definer):
            node = self._nodes[definer]
            if node.op == "get_attr" or (
                node.op == "placeholder" and node.name not in freed_inputs
            ):
                continue
            num_bytes = costs.of(node).result_bytes[self.result_index[storage]]
            if num_bytes:
                yield Storage(num_bytes, definer, tuple(uses[storage]), storage in self.outputs)


def _written_nodes(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node mutates. A higher-order operator with effects names none: all."""
    if node.op != "call_function" or _is_check(node):
        return []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes if node.is_impure() else []
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    return [a for argument, a in _schema_arguments(node) if argument.is_write]


def _aliased_node(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the result shares by the operator's schema, None if none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if not any(returned.alias_info for returned in target._schema.returns):
        return None
    aliased = [a for argument, a in _schema_arguments(node) if argument.alias_info is not None]
    return aliased[0] if len(aliased) == 1 else None


def _schema_arguments(node: fx.Node) -> Iterator[tuple[Any, fx.Node]]:
    """Pairs of a schema argument and a node given for it."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, list | tuple) else (given,):
            if isinstance(value, fx.Node):
                yield argument, value


def _is_check(node: fx.Node) -> bool:
    return graph.is_call(node, *_CHECKS)


def _is_other_effect(node: fx.Node) -> bool:
    """Whether a node has an effect that neither a storage nor a collective stands for."""
    if node.op != "call_function" or _is_check(node) or collectives.is_host_read(node):
        return False
    if collectives.is_start(node) or collectives.is_wait(node):
        return False
    if graph.draws_random_numbers(node):
        return True
    target = node.target
    is_mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return not is_mutable and node.is_impure(impure_random=False)


def _dependencies(
    nodes: Sequence[fx.Node], position: dict[fx.Node, int], memory: _Memory
) -> tuple[tuple[int, ...], ...]:
    deps = [{position[source]: None for source in node.all_input_nodes} for node in nodes]
    _order_writes(memory, deps)
    _chain([i for i, node in enumerate(nodes) if _is_other_effect(node)], deps)
    _order_p2p(nodes, deps)
    return tuple(tuple(sorted(d)) for d in deps)


def _chain(positions: Sequence[int], deps: list[dict[int, None]]) -> None:
    for before, after in itertools.pairwise(positions):
        deps[after][before] = None


def _order_writes(memory: _Memory, deps: list[dict[int, None]]) -> None:
    """Reads and writes of a storage that is ever written keep their order."""
    written = {storage for storages in memory.written for storage in storages}
    last_write: dict[int, int] = {}
    reads: dict[int, list[int]] = {storage: [] for storage in written}
    for i, touched in enumerate(memory.touched):
        for storage in (s for s in touched if s in written):
            if storage in last_write:
                deps[i][last_write[storage]] = None
            if storage not in memory.written[i]:
                reads[storage].append(i)
                continue
            deps[i] |= dict.fromkeys(reads[storage])
            reads[storage] = []
            last_write[storage] = i


def _order_p2p(nodes: Sequence[fx.Node], deps: list[dict[int, None]]) -> None:
    """Point-to-point starts keep their order, and a wait stays behind the starts before it: a
    peer may be waiting for one of them."""
    last_start = -1
    for i, node in enumerate(nodes):
        is_start = collectives.is_start(node) and collectives.kind_of(node) is Kind.P2P
        start = _start_of(node)
        is_wait = start is not None and collectives.kind_of(start) is Kind.P2P
        if last_start >= 0 and (is_start or is_wait):
            deps[i][last_start] = None
        last_start = i if is_start else last_start


class Clock:
    """The machine in motion: `play` one task after the other, in the order the host issues them.

    time_us: when the compute queue has finished everything played so far.
    begin_us, end_us: by position, for the tasks played; a collective's end is known once the
        clock has passed it, at the latest after `finish`.
    """

    def __init__(self, program: Program, machine: Machine) -> None:
        self.time_us = 0.0
        self.begin_us = [0.0] * len(program)
        self.end_us = [0.0] * len(program)
        self.finished: list[int] = []
        self._program = program
        self._machine = machine
        self._host_us = 0.0
        self._link_us = 0.0
        self._queues: list[deque[int]] = [deque() for _ in program.group_names]
        self._left_us = [0.0] * len(program.group_names)
        self._backlog_us = [0.0] * len(program.group_names)
        self._num_on_link = [0] * (max(program.links, default=-1) + 1)
        self._active: list[int] = []
        self._is_finished = bytearray(len(program))

    def play(self, task: int) -> None:
        kind = self._program.kinds[task]
        if kind is TaskKind.FREE:
            return
        begin_us = self._launch(task)
        match kind:
            case TaskKind.START:
                self._enqueue(task)
                return
            case TaskKind.WAIT:
                self._wait(self._program.starts[task])
            case TaskKind.HOST_READ:
                self.time_us += self._program.durations[task]
                self._host_us = self.time_us
            case _:
                self._compute(self._program.durations[task])
        self.begin_us[task] = begin_us
        self.end_us[task] = self.time_us

    def is_finished(self, start: int) -> bool:
        """Whether a collective that was started is done by now."""
        return bool(self._is_finished[start])

    def backlog_us(self, group: int) -> float:
        """Work left in a group's FIFO, as if it had its link alone."""
        return self._backlog_us[group]

    def others_left_us(self, group: int) -> list[float]:
        """Work left of each collective in flight on the group's link in another group's FIFO."""
        links = self._program.links
        return [self._left_us[g] for g in self._active if g != group and links[g] == links[group]]

    def next_finish_us(self) -> float | None:
        """When the next collective in flight will finish, None if nothing is in flight."""
        self._run_links(self.time_us)
        return None if not self._active else self._link_us + self._step_us()

    def next_finished(self) -> list[int]:
        """The starts whose collectives will finish next, at `next_finish_us`."""
        if not self._active:
            return []
        links, share, step_us = self._program.links, self._num_on_link, self._step_us()
        return [
            self._queues[group][0]
            for group in self._active
            if self._left_us[group] * share[links[group]] <= step_us + _EPSILON_US
        ]

    def block(self) -> None:
        """Let the compute queue idle until the next collective in flight finishes."""
        self._advance(self._step_us())
        self.time_us = max(self.time_us, self._link_us)

    def finish(self) -> float:
        """Let everything in flight arrive; the makespan in microseconds."""
        while self._active:
            self._advance(self._step_us())
        last_us = [self.end_us[start] for start in self.finished[-1:]]
        return max([self.time_us, self._host_us, *last_us])

    def _launch(self, task: int) -> float:
        """Charge the launch of one task; when the device could begin with it."""
        issue_us = self._program.issue_us
        launch_us = self._machine.launch_us + (issue_us[task] if issue_us else 0.0)
        begin_us = self.time_us
        if self._machine.is_stream:
            self._host_us += launch_us
            self.time_us = begin_us = max(self.time_us, self._host_us)
        else:
            self.time_us += launch_us
        self._run_links(self.time_us)
        return begin_us

    def _enqueue(self, task: int) -> None:
        group = self._program.groups[task]
        queue = self._queues[group]
        queue.append(task)
        self._backlog_us[group] += self._program.durations[task]
        self.begin_us[task] = self.time_us
        if len(queue) == 1:
            self._activate(group)

    def _activate(self, group: int) -> None:
        task = self._queues[group][0]
        self.begin_us[task] = max(self.begin_us[task], self._link_us)
        self._left_us[group] = self._program.durations[task]
        self._active.append(group)
        self._num_on_link[self._program.links[group]] += 1

    def _wait(self, start: int) -> None:
        while not self._is_finished[start]:
            assert self._active, f"{self._program.names[start]} was never started"
            self._advance(self._step_us())
        self.time_us = max(self.time_us, self.end_us[start])

    def _compute(self, work_us: float) -> None:
        factor = 1.0 + self._machine.contention
        while factor > 1.0 and self._active and work_us > 0:
            step_us = min(self._step_us(), work_us * factor)
            self._advance(step_us)
            self.time_us = self._link_us
            work_us -= step_us / factor
            if work_us < _EPSILON_US:
                return
        self.time_us += work_us
        self._run_links(self.time_us)

    def _step_us(self) -> float:
        """Time until the next collective in flight finishes, all going on as they are."""
        links, share = self._program.links, self._num_on_link
        return min(self._left_us[g] * share[links[g]] for g in self._active)

    def _run_links(self, until_us: float) -> None:
        while self._active and self._link_us < until_us:
            self._advance(min(self._step_us(), until_us - self._link_us))
        self._link_us = max(self._link_us, until_us)

    def _advance(self, step_us: float) -> None:
        """Let what is in flight go on for that long, at most until the next one finishes."""
        self._link_us += step_us
        finished: list[int] = []
        for group in self._active:
            done_us = step_us / self._num_on_link[self._program.links[group]]
            self._left_us[group] -= done_us
            self._backlog_us[group] -= done_us
            if self._left_us[group] < _EPSILON_US:
                finished.append(group)
        for group in finished:
            self._retire(group)

    def _retire(self, group: int) -> None:
        task = self._queues[group].popleft()
        self.end_us[task] = self._link_us
        self._is_finished[task] = True
        self.finished.append(task)
        self._active.remove(group)
        self._num_on_link[self._program.links[group]] -= 1
        if self._queues[group]:
            self._activate(group)
        else:
            self._backlog_us[group] = 0.0


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that occupies a lane ("compute", "host" or a group) for a while."""

    name: str
    lane: str
    start_us: float
    end_us: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One order played on a machine.

    events: by start; waits that blocked for no time are left out.
    makespan_us: from the first issue to the last end.
    compute_us, comm_us: how long compute, and communication, was going on (unions of intervals).
    exposed_us: how much of the communication had no compute beside it.
    exposed: the same by collective.
    peak_bytes, peak_at: most memory alive at once, and the node at which.
    """

    events: tuple[Event, ...]
    makespan_us: float
    compute_us: float
    comm_us: float
    exposed_us: float
    exposed: tuple[tuple[str, float], ...]
    peak_bytes: int
    peak_at: str

    @property
    def hidden_us(self) -> float:
        return self.comm_us - self.exposed_us

    @property
    def hidden(self) -> float:
        """The part of the communication that compute covers, from 0 to 1; 1 if there is none."""
        return self.hidden_us / self.comm_us if self.comm_us else 1.0


def simulate(program: Program, order: Sequence[int], machine: Machine) -> Timeline:
    """Play `program` in `order`. Raises PassError if that is no order of it."""
    check_order(program, order)
    clock = Clock(program, machine)
    for task in order:
        clock.play(task)
    makespan_us = clock.finish()
    events = tuple(sorted(_events(program, order, clock), key=lambda e: (e.start_us, e.end_us)))
    return _timeline(program, order, events, makespan_us)


def makespan(program: Program, order: Sequence[int], machine: Machine) -> float:
    """How long `program` takes in `order`, in microseconds; the order is not checked."""
    clock = Clock(program, machine)
    for task in order:
        clock.play(task)
    return clock.finish()


def _events(program: Program, order: Sequence[int], clock: Clock) -> Iterator[Event]:
    for task in order:
        begin_us, end_us = clock.begin_us[task], clock.end_us[task]
        match program.kinds[task]:
            case TaskKind.COMPUTE:
                lane = "compute"
            case TaskKind.HOST_READ:
                lane = "host"
            case TaskKind.WAIT if end_us > begin_us:
                lane = "host"
            case TaskKind.START:
                lane = program.group_names[program.groups[task]]
            case _:
                continue
        yield Event(program.names[task], lane, begin_us, end_us)


def _timeline(
    program: Program, order: Sequence[int], events: tuple[Event, ...], makespan_us: float
) -> Timeline:
    compute = _union((e.start_us, e.end_us) for e in events if e.lane == "compute")
    transfers = [e for e in events if e.lane not in ("compute", "host")]
    comm = _union((e.start_us, e.end_us) for e in transfers)
    comm_us = _length(comm)
    peak_bytes, peak_at = peak_memory(program, order)
    return Timeline(
        events=events,
        makespan_us=makespan_us,
        compute_us=_length(compute),
        comm_us=comm_us,
        exposed_us=comm_us - _common(comm, compute),
        exposed=tuple(_exposed(transfers, compute)),
        peak_bytes=peak_bytes,
        peak_at=program.names[peak_at] if peak_at >= 0 else "",
    )


def _exposed(
    transfers: Sequence[Event], compute: Sequence[tuple[float, float]]
) -> Iterator[tuple[str, float]]:
    """Per collective, the time that no compute covers. Both run by start time."""
    first = 0
    for event in transfers:
        while first < len(compute) and compute[first][1] <= event.start_us:
            first += 1
        covered, i = 0.0, first
        while i < len(compute) and compute[i][0] < event.end_us:
            covered += min(compute[i][1], event.end_us) - max(compute[i][0], event.start_us)
            i += 1
        yield event.name, event.end_us - event.start_us - covered


Intervals = list[tuple[float, float]]


def _union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Disjoint ascending intervals that cover the same points; the given ones ascend by start."""
    result: Intervals = []
    for begin, end in intervals:
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > begin:
            result.append((begin, end))
    return result


def _length(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)


def _common(a: Intervals, b: Intervals) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def peak_memory(program: Program, order: Sequence[int]) -> tuple[int, int]:
    """Most bytes alive at once when the program runs in `order`, and the position of the node at
    which; (0, -1) if nothing is counted. A value dies after the last node that touches it."""
    profile = memory_profile(program, order)
    if not len(order) or not program.storages:
        return 0, -1
    at = max(range(len(order)), key=lambda i: profile[i])
    return profile[at], order[at]


def memory_profile(program: Program, order: Sequence[int]) -> list[int]:
    """Bytes alive while each node of `order` runs."""
    rank = [0] * len(program)
    for i, task in enumerate(order):
        rank[task] = i
    change = [0] * (len(order) + 1)
    for storage in program.storages:
        begin = rank[storage.definer]
        end = max((rank[use] for use in storage.uses), default=begin)
        change[begin] += storage.num_bytes
        change[len(order) if storage.is_output else max(begin, end) + 1] -= storage.num_bytes
    profile: list[int] = []
    alive = 0
    for i in range(len(order)):
        alive += change[i]
        profile.append(alive)
    return profile


def check_order(program: Program, order: Sequence[int]) -> None:
    """Raises PassError unless `order` names every node once, each behind all that it depends on."""
    rank = [-1] * len(program)
    for i, task in enumerate(order):
        rank[task] = i
    if len(order) != len(program) or -1 in rank:
        raise PassError(
            f"simulate: an order of {len(program)} nodes expected, found {len(order)} nodes, "
            f"{rank.count(-1)} missing"
        )
    for task, deps in enumerate(program.deps):
        for dep in deps:
            if rank[dep] > rank[task]:
                raise PassError(
                    f"simulate: {program.names[task]} depends on {program.names[dep]}, which comes "
                    "after it in this order"
                )


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Trace Event Format, which Perfetto and chrome://tracing open: a thread
    per lane, times in microseconds."""
    lanes = list(dict.fromkeys(["host", "compute", *(event.lane for event in timeline.events)]))
    threads = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}}
        for i, lane in enumerate(lanes)
    ]
    slices = [
        {
            "ph": "X",
            "name": event.name,
            "pid": 0,
            "tid": lanes.index(event.lane),
            "ts": event.start_us,
            "dur": event.end_us - event.start_us,
        }
        for event in timeline.events
    ]
    return {"traceEvents": threads + slices, "displayTimeUnit": "ms"}
