"""The schedule as a value, and the scheduler: an order of the whole graph that hides communication.

Several priorities are tried by list scheduling, and the best order by the simulator is kept, never
one worse than the program's own. All follows from graph and costs, and effort is counted in steps,
never in seconds: every rank finds the same order.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Iterator, Sequence

from overlap import simulate
from overlap.list_scheduler import Budget, ListScheduler, Rule, Shape
from overlap.simulate import Machine, Program, TaskKind, Timeline

PROGRAM_ORDER = "program order"
LOWEST_MEMORY = "lowest memory"

_MIN_GAIN = 1e-4  # relative: less is not worth moving a node
_PATIENCE = 0.6
SEARCH_STEPS = 40_000  # rules tried times nodes, within the limits below
_MIN_ATTEMPTS, _MAX_ATTEMPTS = 4, 200
_NUM_FIXED_RULES = 8
_REACHES = (0.003, 0.01, 0.03, 0.1)
_SHORT = 0.1  # of the longest collective's time: a collective below it prepares another


@dataclasses.dataclass(frozen=True)
class Schedule:
    """An order of a program's nodes, and what it is worth.

    order: positions in program order, as they should run.
    before, after: timelines of the program as written and in this order.
    method: the rule that won; PROGRAM_ORDER if none was better, LOWEST_MEMORY if the program's
        own order breaks the cap and none beats the leanest order known.
    reasons: why nothing moved, or why the memory cap is not kept; empty if all went well.
    """

    order: tuple[int, ...]
    before: Timeline
    after: Timeline
    method: str
    reasons: tuple[str, ...] = ()


def schedule(
    program: Program,
    machine: Machine,
    memory_cap_bytes: int | None = None,
    search_steps: int = SEARCH_STEPS,
) -> Schedule:
    """The best order found for `program` whose peak memory is at most `memory_cap_bytes`.

    search_steps: the effort, in rules tried times nodes; a few rules are tried whatever it is.

    If no order that fits is found: the one of the lowest peak known, with the reason. Depends on
    the arguments alone: every process finds the same order.
    """
    written = tuple(range(len(program)))
    before = simulate.simulate(program, written, machine)
    best = _Best(program, machine, written, PROGRAM_ORDER)
    if memory_cap_bytes is not None and before.peak_bytes > memory_cap_bytes:
        best = _Best(program, machine, _leaner(program, written), LOWEST_MEMORY)
    peak_bytes, peak_at = simulate.peak_memory(program, best.order)
    if memory_cap_bytes is not None and peak_bytes > memory_cap_bytes:
        reason = (
            f"no order found within the memory cap of {memory_cap_bytes} bytes; the lowest peak "
            f"known is {peak_bytes}, at {program.names[peak_at]}: raise memory_budget"
        )
    else:
        _improve(best, memory_cap_bytes, search_steps)
        reason = _why_not(best)
    after = before if best.order == written else simulate.simulate(program, best.order, machine)
    return Schedule(best.order, before, after, best.method, (reason,) if reason else ())


def _leaner(program: Program, order: tuple[int, ...]) -> tuple[int, ...]:
    """The one of `order` and the lean order that peaks lower."""
    lean = lean_order(program)
    return min(order, lean, key=lambda each: simulate.peak_memory(program, each)[0])


def _why_not(best: _Best) -> str:
    """Why program order was kept; "" if it was not."""
    if best.method != PROGRAM_ORDER:
        return ""
    if TaskKind.START not in best.program.kinds:
        return "nothing moved: the graph has no collective"
    if best.is_optimal:
        return "nothing moved: program order meets the lower bound"
    return f"nothing moved: none of {best.num_tried} priorities tried beats program order"


def lower_bound_us(program: Program, machine: Machine) -> float:
    """No order is faster, in microseconds: the critical path, the host's launches, and for the
    compute queue and every link its whole load between the shortest way to its first task and the
    shortest way from its last one."""
    heads, tails = _heads(program), _tails(program, 1.0)
    lanes: dict[int, list[int]] = {}
    for task, kind in enumerate(program.kinds):
        if kind is TaskKind.START:
            lanes.setdefault(program.links[program.groups[task]], []).append(task)
        elif kind in (TaskKind.COMPUTE, TaskKind.HOST_READ):
            lanes.setdefault(-1, []).append(task)
    loads_us = [
        min(heads[t] for t in tasks)
        + sum(program.durations[t] for t in tasks)
        + min(tails[t] - program.durations[t] for t in tasks)
        for tasks in lanes.values()
    ]
    num_launched = len(program) - program.kinds.count(TaskKind.FREE)
    launches_us = num_launched * machine.launch_us + sum(program.issue_us)
    launches_us += program.total_us(TaskKind.HOST_READ)
    if not machine.is_stream:
        launches_us += program.total_us(TaskKind.COMPUTE)
    return max([launches_us, *loads_us, *tails])


def _heads(program: Program) -> list[float]:
    """By position, the longest path from the beginning up to a task, the task itself left out."""
    heads = [0.0] * len(program)
    for task, deps in enumerate(program.deps):
        heads[task] = max((heads[dep] + program.durations[dep] for dep in deps), default=0.0)
    return heads


def lean_order(program: Program) -> tuple[int, ...]:
    """An order of low peak memory: of the ready nodes, always the one that frees most."""
    shape = Shape(program)
    num_missing = [len(deps) for deps in program.deps]
    num_touching = [1 + len(storage.uses) for storage in program.storages]
    last = len(program) - 1

    def growth(task: int) -> int:
        freed_bytes = sum(
            program.storages[s].num_bytes
            for s in shape.touches[task]
            if num_touching[s] == 1 and not program.storages[s].is_output
        )
        return shape.made_bytes[task] - freed_bytes

    ready: list[tuple[int, int]] = []
    order: list[int] = []

    def run(task: int) -> None:
        order.append(task)
        for s in shape.touches[task]:
            num_touching[s] -= 1
        for user in shape.users[task]:
            num_missing[user] -= 1
            if num_missing[user] == 0 and user != last:
                heapq.heappush(ready, (growth(user), user))

    for task in range(program.num_inputs, last):
        if num_missing[task] == 0:
            heapq.heappush(ready, (growth(task), task))
    for task in range(program.num_inputs):
        run(task)
    while ready:
        _, task = heapq.heappop(ready)
        # What a node frees changes as others run, so its place is checked when its turn comes.
        now = (growth(task), task)
        if ready and now > ready[0]:
            heapq.heappush(ready, now)
        else:
            run(task)
    return (*order, last)


def _tails(program: Program, comm_weight: float) -> list[float]:
    """By position, the longest path from a task to the end, the task itself included."""
    tails = [0.0] * len(program)
    for task in range(len(program) - 1, -1, -1):
        weight = comm_weight if program.groups[task] >= 0 else 1.0
        tails[task] += program.durations[task] * weight
        for dep in program.deps[task]:
            tails[dep] = max(tails[dep], tails[task])
    return tails


class _Best:
    """The best order so far, and whether it can be beaten."""

    def __init__(
        self, program: Program, machine: Machine, order: tuple[int, ...], method: str
    ) -> None:
        self.program = program
        self.machine = machine
        self.order = order
        self.method = method
        self.num_tried = 0
        self._us = simulate.makespan(program, order, machine)
        self._bound_us = lower_bound_us(program, machine)

    @property
    def is_optimal(self) -> bool:
        return self._us <= self._bound_us * (1 + _MIN_GAIN)

    def offer(self, order: tuple[int, ...], planned_us: float, method: str) -> None:
        """Keep `order`, planned to take that long, if playing it proves it better."""
        self.num_tried += 1
        worth_us = self._us * (1 - _MIN_GAIN)
        if planned_us > worth_us:
            return
        us = simulate.makespan(self.program, order, self.machine)
        if us <= worth_us:
            self.order, self.method, self._us = order, method, us


def _improve(best: _Best, memory_cap_bytes: int | None, search_steps: int) -> None:
    """Try rules until the best order meets the lower bound or the effort is spent."""
    program = best.program
    if TaskKind.START not in program.kinds:
        return
    shape = Shape(program)
    references = [best.order]
    num_attempts = max(_MIN_ATTEMPTS, min(_MAX_ATTEMPTS, search_steps // len(program)))
    for i, rule in enumerate(itertools.islice(_rules(best), num_attempts)):
        if best.is_optimal:
            return
        budget = None
        if memory_cap_bytes is not None:
            if i == _NUM_FIXED_RULES:
                lean = lean_order(program)
                fits = simulate.peak_memory(program, lean)[0] <= memory_cap_bytes
                references += [lean, best.order] if fits else [best.order]
            reference = references[i % len(references)]
            budget = Budget(program, shape, reference, memory_cap_bytes)
        order, planned_us = ListScheduler(program, best.machine, shape, rule, budget).run()
        best.offer(order, planned_us, rule.name)


def _rules(best: _Best) -> Iterator[Rule]:
    """Rules to try, the most promising first, without end: the later ones search near the best
    order so far, and perturb the critical path, from a fixed seed, so that all processes try the
    same ones.

    Blocks of the program's order are for tight memory: with two, half of the slices run beside
    each other, then the other half.
    """
    program = best.program
    tails = _tails(program, 1.0)
    in_turn = _keys_in_turn(program, tails)
    yield Rule("slices in turn", in_turn)
    yield Rule("slices in turn, patient", in_turn, _PATIENCE)
    yield Rule("critical path", _keys(tails))
    yield Rule("critical path in 2 blocks", _keys(tails, num_blocks=2))
    yield Rule("critical path, patient", _keys(tails), _PATIENCE)
    yield Rule("order of the program, patient", range(len(program)), _PATIENCE)
    yield Rule("critical path in 4 blocks", _keys(tails, num_blocks=4))
    yield Rule("communication first", _keys(_tails(program, comm_weight=4.0)))
    generator = random.Random(0)
    weighted = [tails, _tails(program, comm_weight=3.0)]
    for i in itertools.count():
        if i % 4:
            reach = generator.choice(_REACHES) * len(program)
            keys = _keys_near(best.order, reach, generator)
            yield Rule(f"near the best, {i}", keys, generator.choice((0.0, _PATIENCE)))
            continue
        base, spread = generator.choice(weighted), generator.choice((0.1, 0.3, 1.0))
        noisy = [tail * (1 + spread * generator.random()) for tail in base]
        keys = _keys(noisy, num_blocks=generator.choice((1, 1, 2, 3)))
        yield Rule(f"critical path, perturbed {i}", keys, generator.choice((0.0, _PATIENCE)))


def _keys_near(order: Sequence[int], reach: float, generator: random.Random) -> list[int]:
    """Keys for an order in which tasks have moved, most of them by up to `reach` positions."""
    moved = [-(position + reach * generator.gauss(0, 1)) for position in range(len(order))]
    priorities = [0.0] * len(order)
    for task, priority in zip(order, moved, strict=True):
        priorities[task] = priority
    return _keys(priorities)


def _keys(priorities: Sequence[float], num_blocks: int = 1) -> list[int]:
    """Keys for priorities, high first, blocks of program order one after the other; equal ones
    keep program order."""
    size = len(priorities)
    ranked = sorted(range(size), key=lambda t: (t * num_blocks // size, -priorities[t], t))
    keys = [0] * size
    for key, task in enumerate(ranked):
        keys[task] = key
    return keys


def _keys_in_turn(program: Program, tails: Sequence[float]) -> list[int]:
    """Keys that finish what one collective needs before work for the next begins.

    The critical path alone takes turns between equal slices kernel by kernel, so that all of them
    reach their collective late, at the same time. Collectives come in order of how many precede
    them on a path, then of the program; what none waits for comes last. A short one, such as an
    exchange of counts, belongs to the long one that it prepares.
    """
    size = len(program)
    starts = [t for t in range(size) if program.kinds[t] is TaskKind.START]
    longest_us = max(program.durations[t] for t in starts)
    is_long = bytearray(size)
    for task in starts:
        is_long[task] = program.durations[task] >= _SHORT * longest_us
    depth = [0] * size
    for task, deps in enumerate(program.deps):
        depth[task] = max((depth[dep] for dep in deps), default=0) + is_long[task]
    next_start = [(size, size)] * size
    for task in reversed(range(size)):
        if is_long[task]:
            next_start[task] = (depth[task], task)
        for dep in program.deps[task]:
            next_start[dep] = min(next_start[dep], next_start[task])
    ranked = sorted(range(size), key=lambda t: (next_start[t], -tails[t], t))
    keys = [0] * size
    for key, task in enumerate(ranked):
        keys[task] = key
    return keys
