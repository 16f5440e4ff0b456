"""schedule: nodes move so that collectives are in flight while others compute.

    before   a = start(x0);  wa = wait(a);  y = f(wa);  b = start(x1);  wb = wait(b);  z = f(wb)
    after    a = start(x0);  b = start(x1);  wa = wait(a);  y = f(wa);  wb = wait(b);  z = f(wb)

Why it is correct: the new order keeps every dependency of data and effects. The order of a group's
starts depends on the graph and the cost table alone, so it is the same on every rank.

Cost: values live longer; `memory_budget` caps the peak. Never worse than program order in the
scheduler's own simulation. Routing is not balanced as the costs assume, so the order is the best
for collectives that take `SKEW` times as long: filler then stands where a late exchange needs it.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from overlap import cost, graph, schedule, simulate
from overlap.graph import Phase
from overlap.hardware import Profile
from overlap.pipeline import Context, Effect

SKEW = 1.5
"""How much longer the busiest rank's exchange may take than a balanced one. Published: with real
routing all-to-alls take up to four times as long as with forced balance (TorchTitan RFC #3434)."""


@dataclasses.dataclass(frozen=True)
class MemoryCap:
    """Bytes that the schedule's peak may reach; None for no limit."""

    num_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """What the last run decided, for the report."""

    program: simulate.Program
    machine: simulate.Machine
    schedule: schedule.Schedule

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
        profile = ctx.fact(Profile)
        sizes = ctx.fact_or_none(cost.Sizes)
        program = simulate.extract(gm, cost.estimate(gm, profile, ctx.group_size, sizes))
        machine = simulate.Machine.of(profile)
        result = _schedule(program, machine, ctx.fact(MemoryCap).num_bytes)
        for reason in result.reasons:
            ctx.remark("skipped", reason)
        nodes = list(gm.graph.nodes)
        graph.reorder(gm.graph, [nodes[i] for i in result.order])
        ctx.provide(Scheduled(program, machine, result))


def _schedule(
    program: simulate.Program, machine: simulate.Machine, cap_bytes: int | None
) -> schedule.Schedule:
    """The schedule for skewed collectives, told in the times of balanced ones."""
    durations = tuple(
        duration * SKEW if kind is simulate.TaskKind.START else duration
        for duration, kind in zip(program.durations, program.kinds, strict=True)
    )
    skewed = dataclasses.replace(program, durations=durations)
    result = schedule.schedule(skewed, machine, cap_bytes)
    before = simulate.simulate(program, range(len(program)), machine)
    after = simulate.simulate(program, result.order, machine)
    if after.makespan_us > before.makespan_us:
        return schedule.schedule(program, machine, cap_bytes)
    return dataclasses.replace(result, before=before, after=after)
