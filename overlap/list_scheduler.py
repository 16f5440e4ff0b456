"""List scheduling under a memory cap: one order of a program, by one priority rule.

It runs on the simulator's own clock. At each step the ready compute of highest priority
runs; just before it, collectives are started where a link would run dry meanwhile, and no earlier,
so that a more urgent one may still overtake. Views, scalars and waits are placed when somebody
needs them: a wait goes right before its first reader.

The memory cap is kept by a *reference*, an order that fits it. At all times what is left of the
reference, run in its own order from here, fits. A step that would break this is put off, and the
first node left in the reference is always possible: the scheduler cannot paint itself into a
corner. The check is a profile of memory along what is left of the reference, updated by ranges.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from overlap import simulate
from overlap.simulate import Clock, Machine, Program, TaskKind

_EPSILON_US = 1e-6
_NUM_TRIES = 4  # tasks that memory refuses before the reference decides


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the list scheduler chooses.

    name: for reports.
    keys: by position; of two ready tasks the smaller key goes first. No two are equal.
    patience: rather than run a kernel, the queue idles for up to this fraction of its duration if
        a collective then arrives that something more urgent waits for.
    """

    name: str
    keys: Sequence[int]
    patience: float = 0.0


class Shape:
    """What the list scheduler looks up of a program, indexed once for all rules.

    users: by position, who depends on it. waits: by start, its waits.
    touches: by position, the storages that it makes or touches; made_bytes: what it makes.
    is_leaf: by position, whether it is free and has no user at all: an assertion.
    is_needed: by position, whether any compute, host read or collective depends on it.
    """

    def __init__(self, program: Program) -> None:
        size = len(program)
        self.users: list[list[int]] = [[] for _ in range(size)]
        self.waits: list[list[int]] = [[] for _ in range(size)]
        self.touches: list[list[int]] = [[] for _ in range(size)]
        self.made_bytes = [0] * size
        for task, deps in enumerate(program.deps):
            for dep in deps:
                self.users[dep].append(task)
            if program.starts[task] >= 0:
                self.waits[program.starts[task]].append(task)
        self.is_needed = bytearray(size)
        for task in reversed(range(size)):
            if program.kinds[task] not in (TaskKind.FREE, TaskKind.WAIT) or self.is_needed[task]:
                for dep in program.deps[task]:
                    self.is_needed[dep] = 1
        for i, storage in enumerate(program.storages):
            self.made_bytes[storage.definer] += storage.num_bytes
            for task in (storage.definer, *storage.uses):
                self.touches[task].append(i)
        self.is_leaf = [
            program.kinds[task] is TaskKind.FREE
            and not self.users[task]
            and program.num_inputs <= task < size - 1
            for task in range(size)
        ]


@dataclasses.dataclass
class _Undo:
    """What `Budget.admit` did so far."""

    front: int
    alive_bytes: int
    ranks: list[int]
    ranges: list[tuple[int, int, int]]
    popped: list[tuple[int, int]]


class Budget:
    """Admits a step only if afterwards what is left of the reference still fits the cap.

    Memory peaks where something is made, so `_profile` has one entry per task of the reference
    that makes something, a *maker*: the bytes alive while it runs, if all that is admitted has run
    and what is left then runs in the reference's order. Makers that have run are sunk far below
    zero, so that a maximum over a range skips them.
    """

    _SUNK = 1 << 60

    def __init__(
        self, program: Program, shape: Shape, reference: Sequence[int], cap_bytes: int
    ) -> None:
        self.reference = reference
        self._storages = program.storages
        self._shape = shape
        self._cap_bytes = cap_bytes
        self._rank = [0] * len(program)
        self._num_makers = [0] * (len(program) + 1)
        for i, task in enumerate(reference):
            self._rank[task] = i
            self._num_makers[i + 1] = self._num_makers[i] + (shape.made_bytes[task] > 0)
        full = simulate.memory_profile(program, reference)
        makers = [full[i] for i, task in enumerate(reference) if shape.made_bytes[task]]
        self._profile = np.array(makers, dtype=np.int64)
        self._has_run = bytearray(len(program))
        self._front = 0
        self._alive_bytes = 0
        # Ranks at which a storage is still to be touched, ascending; the last ones are popped.
        self._touches = [
            sorted(self._rank[task] for task in (s.definer, *s.uses)) for s in program.storages
        ]

    @property
    def front(self) -> int:
        """The first task that is left in the reference."""
        return self.reference[self._front]

    def admit(self, tasks: Sequence[int]) -> bool:
        """Account for running `tasks` now, in this order, and say True; or change nothing."""
        undo = _Undo(self._front, self._alive_bytes, [], [], [])
        if all(self._run(task, undo) for task in tasks) and self._fits(undo):
            return True
        self._take_back(undo)
        return False

    def _run(self, task: int, undo: _Undo) -> bool:
        """Account for one task; False if it does not fit right now."""
        made_bytes = self._shape.made_bytes[task]
        if self._alive_bytes + made_bytes > self._cap_bytes:
            return False
        rank = self._rank[task]
        self._has_run[rank] = 1
        undo.ranks.append(rank)
        if made_bytes:
            self._alive_bytes += made_bytes
            self._change(self._front, rank, made_bytes, undo)
            self._profile[self._num_makers[rank]] -= self._SUNK
        for storage in self._shape.touches[task]:
            touches = self._touches[storage]
            if touches[-1] == rank:
                self._die_earlier(storage, rank, undo)
        if rank == self._front:
            has_run, front = self._has_run, rank
            while front < len(has_run) and has_run[front]:
                front += 1
            self._front = front
        return True

    def _die_earlier(self, storage: int, rank: int, undo: _Undo) -> None:
        """The last task to touch a storage, at `rank`, has run before others that are left."""
        touches = self._touches[storage]
        while touches and self._has_run[touches[-1]]:
            undo.popped.append((storage, touches.pop()))
        if self._storages[storage].is_output:
            return
        num_bytes = self._storages[storage].num_bytes
        if touches:
            self._change(touches[-1] + 1, rank, -num_bytes, undo)
        else:
            self._alive_bytes -= num_bytes
            self._change(self._front, rank, -num_bytes, undo)

    def _change(self, first: int, last: int, num_bytes: int, undo: _Undo) -> None:
        """Change the profile for the makers at ranks `first` up to, not including, `last`."""
        low, high = self._num_makers[first], self._num_makers[last]
        if low < high:
            self._profile[low:high] += num_bytes
            undo.ranges.append((low, high, num_bytes))

    def _fits(self, undo: _Undo) -> bool:
        raised = [high for _, high, num_bytes in undo.ranges if num_bytes > 0]
        if not raised:
            return True
        low, high = self._num_makers[self._front], max(raised)
        return low >= high or int(self._profile[low:high].max()) <= self._cap_bytes

    def _take_back(self, undo: _Undo) -> None:
        for storage, rank in reversed(undo.popped):
            self._touches[storage].append(rank)
        for low, high, num_bytes in undo.ranges:
            self._profile[low:high] -= num_bytes
        for rank in undo.ranks:
            self._has_run[rank] = 0
            if self._shape.made_bytes[self.reference[rank]]:
                self._profile[self._num_makers[rank]] += self._SUNK
        self._front, self._alive_bytes = undo.front, undo.alive_bytes


class ListScheduler:
    """One run of the list scheduler; see the module's description.

    A free task or a finished wait is *passed* as soon as all that it needs is passed: it holds
    nobody up. It is *played*, which gives it a place in the order, when a played task needs it.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        shape: Shape,
        rule: Rule,
        budget: Budget | None,
    ) -> None:
        self._program = program
        self._shape = shape
        self._keys = rule.keys
        self._patience = rule.patience
        self._budget = budget
        # The host of a stream launches ahead, beside the kernels.
        self._launch_us = 0.0 if machine.is_stream else machine.launch_us
        self._clock = Clock(program, machine)
        self._order: list[int] = []
        self._task_of_key = [0] * len(program)
        for task, key in enumerate(rule.keys):
            self._task_of_key[key] = task
        self._num_missing = [len(deps) for deps in program.deps]
        self._num_unplayed = [len(deps) for deps in program.deps]
        self._is_passed = bytearray(len(program))
        self._is_played = bytearray(len(program))
        self._compute: list[int] = []
        self._starts: list[list[int]] = [[] for _ in program.group_names]
        self._overdue: list[tuple[float, int]] = []
        self._num_seen = 0

    def run(self) -> tuple[tuple[int, ...], float]:
        """The order, and how long it is planned to take in microseconds."""
        inputs = range(self._program.num_inputs)
        if self._budget is not None:
            self._budget.admit(inputs)
        self._play_all(inputs)
        for task, deps in enumerate(self._program.deps):
            if not deps and self._ready(task):
                self._pass(task)
        while self._step():
            pass
        rest = range(len(self._program)) if self._budget is None else self._budget.reference
        self._play_all([task for task in rest if not self._is_played[task]])
        return tuple(self._order), self._clock.finish()

    def _step(self) -> bool:
        """Place some nodes; False when no compute and no collective is left."""
        self._arrive()
        task = self._next_compute()
        if task < 0:
            return self._idle()
        work_us = self._program.durations[task] + self._launch_us * self._num_launched(task)
        self._start_collectives(work_us + self._launch_us)  # the next start is launched after it
        if self._has_arrived():
            return True
        if self._is_worth_waiting(task, work_us):
            self._block()
            return True
        return self._run_compute() or self._run_front()

    def _idle(self) -> bool:
        """No compute is ready: start what can be started, then let the next collective arrive."""
        self._start_collectives(_EPSILON_US)
        finish_us = self._clock.next_finish_us()
        if self._has_arrived():
            return True
        if finish_us is None:
            return any(self._starts) and self._run_front()
        self._start_collectives(finish_us - self._clock.time_us + self._launch_us)
        if not self._has_arrived():
            self._block()
        return True

    def _has_arrived(self) -> bool:
        """Whether a collective finished since the last look, as while another was launched."""
        return self._num_seen < len(self._clock.finished)

    def _block(self) -> None:
        """Wait for the next collective to arrive."""
        first_seen = len(self._clock.finished)
        # A wait is launched while its collective still runs; where none can be, the queue idles.
        if not any(self._try(wait) for wait in self._next_waits()):
            self._clock.block()
        self._arrive()
        for start in self._clock.finished[first_seen:]:
            for wait in self._shape.waits[start]:
                if self._is_passed[wait] and not self._is_played[wait]:
                    self._try(wait)

    def _next_waits(self) -> list[int]:
        """Waits that nothing but the next collectives to arrive holds up."""
        return [
            wait
            for start in self._clock.next_finished()
            for wait in self._shape.waits[start]
            if self._num_missing[wait] == 0 and not self._is_played[wait]
        ]

    def _next_compute(self) -> int:
        """The ready compute of the smallest key, -1 if there is none."""
        while self._compute:
            task = self._task_of_key[self._compute[0]]
            if not self._is_played[task]:
                return task
            heapq.heappop(self._compute)
        return -1

    def _run_compute(self) -> bool:
        """Run the most urgent ready compute that memory admits, out of the first few."""
        refused: list[int] = []
        has_run = False
        while self._compute and len(refused) < _NUM_TRIES and not has_run:
            key = heapq.heappop(self._compute)
            task = self._task_of_key[key]
            if self._is_played[task]:
                continue
            has_run = self._try(task)
            if not has_run:
                refused.append(key)
        for key in refused:
            heapq.heappush(self._compute, key)
        return has_run

    def _run_front(self) -> bool:
        """Memory admits nothing urgent: run what the reference runs next."""
        assert self._budget is not None
        front = self._budget.front
        if front == len(self._program) - 1:
            return False
        has_run = self._try(front)
        assert has_run, f"{self._program.names[front]} does not fit its own reference"
        return True

    def _start_collectives(self, horizon_us: float) -> None:
        """Start collectives, the most urgent first, in every FIFO that would be empty before
        `horizon_us` from now."""
        for _, group in sorted((heap[0], g) for g, heap in enumerate(self._starts) if heap):
            heap = self._starts[group]
            refused: list[int] = []
            while heap and len(refused) < _NUM_TRIES and self._is_due(group, horizon_us):
                key = heapq.heappop(heap)
                task = self._task_of_key[key]
                if not self._is_played[task] and not self._try(task):
                    refused.append(key)
            for key in refused:
                heapq.heappush(heap, key)

    def _is_due(self, group: int, horizon_us: float) -> bool:
        """Whether a start now keeps the group's FIFO from running dry, and does not slow another
        group's collective on the same link beyond the horizon."""
        if self._clock.backlog_us(group) >= horizon_us - _EPSILON_US / 2:
            return False
        others = self._clock.others_left_us(group)
        if not others or self._clock.backlog_us(group) > 0:
            return True
        return max(others) * (len(others) + 1) <= horizon_us + _EPSILON_US

    def _is_worth_waiting(self, task: int, work_us: float) -> bool:
        finish_us = self._clock.next_finish_us() if self._patience else None
        if finish_us is None or finish_us - self._clock.time_us > self._patience * work_us:
            return False
        return any(
            self._shape.is_needed[wait] and self._keys[wait] < self._keys[task]
            for start in self._clock.next_finished()
            for wait in self._shape.waits[start]
        )

    def _try(self, task: int) -> bool:
        """Play `task` behind all that it still needs, if memory admits it."""
        tasks = self._closure(task)
        if self._budget is not None and not self._budget.admit(tasks):
            return False
        self._play_all(tasks)
        if not self._is_passed[task]:
            self._pass(task)
        return True

    def _num_launched(self, task: int) -> int:
        """How many launches it takes to run `task`: its own, and of waits right before it."""
        if not self._launch_us:
            return 0
        kinds = self._program.kinds
        return sum(kinds[each] is not TaskKind.FREE for each in self._closure(task))

    def _closure(self, task: int) -> list[int]:
        """`task` and the tasks before it that are not played yet, in program order."""
        if self._num_unplayed[task] == 0:
            return [task]
        found = [task]
        seen = {task}
        for current in found:
            for dep in self._program.deps[current]:
                if not self._is_played[dep] and dep not in seen:
                    seen.add(dep)
                    found.append(dep)
        return sorted(found)

    def _play_all(self, tasks: Sequence[int]) -> None:
        leaves: list[int] = []
        for task in tasks:
            self._is_played[task] = 1
            self._order.append(task)
            if self._program.kinds[task] is not TaskKind.FREE:
                self._clock.play(task)
            for user in self._shape.users[task]:
                self._num_unplayed[user] -= 1
                if self._num_unplayed[user] == 0 and self._shape.is_leaf[user]:
                    leaves.append(user)
        for leaf in leaves:
            if not self._is_played[leaf] and (not self._budget or self._budget.admit([leaf])):
                self._play_all([leaf])

    def _arrive(self) -> None:
        """Pass the waits of collectives that have finished; play those that finished long ago."""
        finished = self._clock.finished
        while self._num_seen < len(finished):
            start = finished[self._num_seen]
            self._num_seen += 1
            due_us = self._clock.end_us[start] + self._program.durations[start]
            for wait in self._shape.waits[start]:
                heapq.heappush(self._overdue, (due_us, wait))
                if self._num_missing[wait] == 0 and not self._is_passed[wait]:
                    self._pass(wait)
        while self._overdue and self._overdue[0][0] <= self._clock.time_us:
            _, wait = heapq.heappop(self._overdue)
            if self._is_passed[wait] and not self._is_played[wait]:
                self._try(wait)

    def _pass(self, task: int) -> None:
        """`task` holds nobody up any more."""
        passed = [task]
        while passed:
            current = passed.pop()
            self._is_passed[current] = 1
            for user in self._shape.users[current]:
                self._num_missing[user] -= 1
                if self._num_missing[user] == 0 and self._ready(user):
                    passed.append(user)

    def _ready(self, task: int) -> bool:
        """Queue `task`, which needs nothing more; whether it is passed at once instead."""
        match self._program.kinds[task]:
            case TaskKind.COMPUTE | TaskKind.HOST_READ:
                heapq.heappush(self._compute, self._keys[task])
            case TaskKind.START:
                heapq.heappush(self._starts[self._program.groups[task]], self._keys[task])
            case TaskKind.WAIT:
                return self._clock.is_finished(self._program.starts[task])
            case _:
                return task != len(self._program) - 1
        return False
