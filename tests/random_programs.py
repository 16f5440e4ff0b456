"""Random small programs for the simulator and the scheduler, as plain values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from overlap import simulate
from overlap.simulate import Machine, Program, Storage, TaskKind

_INPUT, _OUTPUT = "x", "output"


def random_program(seed: int, num_tasks: int, num_groups: int = 1) -> Program:
    """A program of about `num_tasks` tasks with random edges, durations and storages; a start
    has its wait right behind it."""
    generator = random.Random(seed)
    names, kinds, durations = [_INPUT], [TaskKind.FREE], [0.0]
    groups, starts, deps = [-1], [-1], [()]

    def add(name: str, kind: TaskKind, us: float, before: set[int], group: int = -1) -> int:
        names.append(f"{name}{len(names)}")
        kinds.append(kind)
        durations.append(us)
        groups.append(group)
        starts.append(-1)
        deps.append(tuple(sorted(before)))
        return len(names) - 1

    readable = [0]
    for _ in range(num_tasks):
        sources = set(generator.sample(readable, min(len(readable), generator.choice((1, 1, 2)))))
        us = generator.choice((0.5, 1.0, 1.0, 2.0))
        match generator.choice(("compute", "compute", "collective", "collective", "free", "read")):
            case "collective":
                start = add("start", TaskKind.START, us, sources, generator.randrange(num_groups))
                wait = add("wait", TaskKind.WAIT, 0.0, {start})
                starts[wait] = start
                readable.append(wait)
            case "free":
                readable.append(add("view", TaskKind.FREE, 0.0, sources))
            case "read":
                readable.append(add("read", TaskKind.HOST_READ, 0.2, sources))
            case _:
                readable.append(add("mm", TaskKind.COMPUTE, us, sources))
    used = {dep for before in deps for dep in before}
    add(_OUTPUT, TaskKind.FREE, 0.0, set(range(len(names))) - used)
    return Program(
        names=tuple(names),
        kinds=tuple(kinds),
        durations=tuple(durations),
        groups=tuple(groups),
        group_names=tuple(f"g{g}" for g in range(num_groups)),
        links=(0,) * num_groups,
        starts=tuple(starts),
        deps=tuple(deps),
        storages=tuple(_storages(generator, kinds, starts, deps)),
        num_inputs=1,
    )


def _storages(
    generator: random.Random,
    kinds: list[TaskKind],
    starts: list[int],
    deps: list[tuple[int, ...]],
) -> Iterator[Storage]:
    """Every compute and start makes one; a wait and its readers use that of the start, and a wait
    uses its start's operands."""
    output = len(kinds) - 1
    made: dict[int, list[int]] = {}
    for task, kind in enumerate(kinds):
        if kind in (TaskKind.COMPUTE, TaskKind.START):
            made[task] = []
    for task, before in enumerate(deps):
        operands = [*before, *(deps[starts[task]] if starts[task] >= 0 else ())]
        for dep in operands:
            owner = starts[dep] if starts[dep] >= 0 else dep
            if owner in made and task != output:
                made[owner].append(task)
    for task, uses in made.items():
        is_output = task in deps[output] or any(starts[dep] == task for dep in deps[output])
        yield Storage(generator.randint(1, 4), task, tuple(dict.fromkeys(uses)), is_output)


def all_orders(program: Program) -> Iterator[tuple[int, ...]]:
    """Every topological order that keeps the input first and the output last."""
    num_users_before = [len(before) for before in program.deps]
    users: list[list[int]] = [[] for _ in program.names]
    for task, before in enumerate(program.deps):
        for dep in before:
            users[dep].append(task)
    order: list[int] = []

    def extend(ready: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not ready:
            yield tuple(order)
        for task in ready:
            order.append(task)
            for user in users[task]:
                num_users_before[user] -= 1
            new = tuple(user for user in users[task] if num_users_before[user] == 0)
            yield from extend(tuple(t for t in ready if t != task) + new)
            for user in users[task]:
                num_users_before[user] += 1
            order.pop()

    yield from extend((0,))


def best_makespan(
    program: Program, machine: Machine, cap_bytes: int | None = None, limit: int = 20_000
) -> float | None:
    """The optimum by trying every order; None if there are more than `limit`, or none fits."""
    orders = list(itertools.islice(all_orders(program), limit + 1))
    if len(orders) > limit:
        return None
    fitting = [
        order
        for order in orders
        if cap_bytes is None or simulate.peak_memory(program, order)[0] <= cap_bytes
    ]
    return min((simulate.makespan(program, o, machine) for o in fitting), default=None)
