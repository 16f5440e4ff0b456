"""torch's own overlap scheduler (torch._inductor.fx_passes.overlap_scheduling) as a pass of ours.

It moves the starts and waits of collectives and leaves the order of compute as it is; it never
slices. Here it gets our costs, and its memory limits are out of the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

from torch import fx
from torch._inductor.fx_passes import overlap_scheduling

from overlap import collectives, cost, presets, schedule, simulate
from overlap.graph import Phase
from overlap.hardware import Profile
from overlap.passes.legalize import Legalize
from overlap.passes.schedule import Scheduled
from overlap.pipeline import Context, Effect

METHOD = "torch's overlap scheduler"


def reorder(gm: fx.GraphModule, ms: Callable[[fx.Node], float]) -> fx.GraphModule:
    """`gm` in the order of torch's scheduler; `ms` gives the time of each node but waits."""

    def estimate_ms(node: fx.Node, override_size: int | None) -> float:
        is_sized = override_size is not None
        return 0.0 if is_sized or collectives.is_wait(node) else ms(node)

    with _some_device():
        return overlap_scheduling.schedule_overlap_bucketing(
            gm,
            compute_estimator="analytical",
            custom_runtime_estimation=estimate_ms,
            collective_bucketing=False,
            pre_bucketing_fsdp_collectives=False,
            # Both limits None would crash it.
            max_memory_increase_gb=1e6,
            max_in_flight_gb=1e6,
        )


@contextlib.contextmanager
def _some_device() -> Generator[None]:
    """torch's scheduler asks for a GPU's figures even where all costs are given."""
    module = "torch.utils._runtime_estimation"
    with (
        mock.patch(f"{module}.get_device_tflops", lambda dtype: 1.0),
        mock.patch(f"{module}.get_gpu_dram_gbps", lambda: 1.0),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class TorchSchedule:
    """torch's scheduler in the place of ours, with the same costs.

    Of a kernel it is told its launch too, which the host has no time for beside it.
    """

    name: str = "torch_schedule"
    effect: Effect = Effect.REORDER
    requires: Phase = Phase.NORMALIZED
    ensures: Phase = Phase.SCHEDULED

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        profile = ctx.fact(Profile)
        costs = cost.estimate(gm, profile, ctx.group_size, ctx.fact_or_none(cost.Sizes))
        program = simulate.extract(gm, costs)
        machine = simulate.Machine.of(profile)
        position = {node: i for i, node in enumerate(gm.graph.nodes)}

        def ms(node: fx.Node) -> float:
            return node_us(program, position[node], machine) / 1e3

        reorder(gm, ms)
        order = tuple(position[node] for node in gm.graph.nodes)
        before = simulate.simulate(program, range(len(program)), machine)
        after = simulate.simulate(program, order, machine)
        ctx.provide(Scheduled(program, machine, schedule.Schedule(order, before, after, METHOD)))


def node_us(program: simulate.Program, task: int, machine: simulate.Machine) -> float:
    """The time of one task; that of a kernel with its launch, where the host runs it."""
    is_kernel = program.kinds[task] in (simulate.TaskKind.COMPUTE, simulate.TaskKind.HOST_READ)
    launch_us = 0.0 if machine.is_stream or not is_kernel else machine.launch_us
    return program.durations[task] + launch_us


@contextlib.contextmanager
def in_place_of_ours() -> Generator[None]:
    """Programs that are compiled meanwhile are sliced by ours and ordered by torch's scheduler."""
    ours = presets.moe

    @functools.wraps(ours)
    def moe(*args: Any, **kwargs: Any) -> presets.Preset:
        return dataclasses.replace(ours(*args, **kwargs), final=(TorchSchedule(), Legalize()))

    with mock.patch.object(presets, "moe", moe):
        yield
