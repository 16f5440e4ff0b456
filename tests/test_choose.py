"""How axis and number of slices are chosen: forecasts of a routed layer, and what they decide."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap import capture, choose, forecast, hardware
from overlap.config import Config
from overlap.forecast import Setting
from overlap.passes.functionalize import functionalize
from overlap.passes.slice import ANALYSES
from overlap.runtime import groups
from overlap.simulate import TaskKind
from tests import routed

AXES = tuple(ANALYSES)


class Stop(Exception):
    """Ends a compilation when its graph is there."""


@pytest.fixture(scope="module")
def captured() -> Iterator[fx.GraphModule]:
    """A routed layer of two ranks, captured as the backend does."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        made = capture.to_aten(gm).gm
        functionalize(made.graph)
        found.append(made)
        raise Stop

    torch._dynamo.reset()
    layer = routed.Layer(routed.Steps(), 2, dist.group.WORLD.group_name)
    with (
        torch._dynamo.config.patch(
            capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
        ),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed),
    ):
        torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)(
            torch.randn(4, 6, routed.D)
        )
    yield found[0]
    dist.destroy_process_group()


def setting(gm: fx.GraphModule, comm_per_compute: float, **changes: Any) -> Setting:
    """Costs under which communication takes so many times as long as compute, and nothing else
    takes time but what `changes` says."""
    names = ("launch_us", "latency_us", "network_latency_us", "host_read_us")
    profile = dataclasses.replace(hardware.load("cpu"), **dict.fromkeys(names, 0.0))
    first = forecast.forward_of(gm, None, 1, Setting.of(gm, profile, groups.size_of))
    total = {kind: sum(t.us for t in first if t.kind is kind) for kind in TaskKind}
    scale = total[TaskKind.START] / (comm_per_compute * total[TaskKind.COMPUTE])
    gbps = profile.network_gbps * scale
    profile = dataclasses.replace(profile, node_gbps=gbps, network_gbps=gbps, **changes)
    return Setting.of(gm, profile, groups.size_of)


@pytest.mark.parametrize("axis", AXES)
def test_slices_do_the_work_of_the_whole(captured: fx.GraphModule, axis: str) -> None:
    """Bytes sent are those of the program; compute grows by joins, and by weights read again."""
    costs = setting(captured, 1.0)
    plan = ANALYSES[axis](captured)
    whole = forecast.forward_of(captured, None, 1, costs)
    parts = forecast.forward_of(captured, plan, 2, costs)

    def total(tasks: list[forecast.Task], kind: TaskKind) -> float:
        return sum(task.us for task in tasks if task.kind is kind)

    assert total(parts, TaskKind.START) == pytest.approx(total(whole, TaskKind.START))
    compute = total(whole, TaskKind.COMPUTE)
    assert compute <= total(parts, TaskKind.COMPUTE) * 1.0001 < 2 * compute
    starts = sum(task.kind is TaskKind.START for task in parts)
    assert starts > sum(task.kind is TaskKind.START for task in whole)


@pytest.mark.parametrize("axis", AXES)
def test_equal_communication_and_compute_hide_each_other(
    captured: fx.GraphModule, axis: str
) -> None:
    costs = setting(captured, 1.0)
    predict = functools.partial(forecast.step_us, captured, setting=costs)
    plan = ANALYSES[axis](captured)
    assert predict(plan, 2) < predict(None, 1)
    assert predict(plan, 2, is_whole_step=True) <= predict(plan, 2) * 1.0001
    assert predict(plan, 2, is_trained=False) < predict(plan, 2)


def test_the_fastest_forecast_is_chosen(captured: fx.GraphModule) -> None:
    choice = choose.choose(captured, Config(), setting(captured, 1.0), is_trained=True)
    assert {candidate.axis for candidate in choice.candidates} == set(AXES)
    best = min(candidate.predicted_us for candidate in choice.candidates)
    (taken,) = (
        candidate
        for candidate in choice.candidates
        if (candidate.axis, candidate.slices) == (choice.axis, choice.slices)
    )
    assert taken.predicted_us <= 1.01 * best
    assert choice.reason == ""


@pytest.mark.parametrize(
    ("comm_per_compute", "changes"),
    [(1e-3, {}), (0.5, {"launch_us": 1e4})],
    ids=["a fast link", "a launch takes longer than a kernel"],
)
def test_what_gains_nothing_is_left_alone_and_says_so(
    captured: fx.GraphModule, comm_per_compute: float, changes: dict[str, float]
) -> None:
    costs = setting(captured, comm_per_compute, **changes)
    choice = choose.choose(captured, Config(), costs, is_trained=True)
    assert choice.slices == 1
    assert "nothing is sliced: forecast are" in choice.reason
    asked = choose.choose(captured, Config(slices=2), costs, is_trained=True)
    assert (asked.slices, asked.reason) == (2, "")


@pytest.mark.parametrize("axis", AXES)
def test_what_the_user_fixes_stays_and_costs_no_forecast(
    captured: fx.GraphModule, axis: str
) -> None:
    config = Config(axis=axis, slices=4)
    choice = choose.choose(captured, config, setting(captured, 1e-3), is_trained=True)
    assert (choice.axis, choice.slices, choice.candidates) == (axis, 4, ())
    only = choose.choose(captured, Config(axis=axis), setting(captured, 1.0), is_trained=True)
    assert {candidate.axis for candidate in only.candidates} == {axis}
