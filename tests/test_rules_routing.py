"""Routed exchanges: which spellings are proven, which are refused and why. No data moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap import capture, collectives, slicing
from overlap.certificate import NONE, Certificate
from overlap.errors import PassError
from overlap.passes.functionalize import functionalize
from overlap.passes.slice import ANALYSES
from tests import routed
from tests.dist import run_ranks


class Stop(Exception):
    """Ends a compilation when its plan is made."""


@pytest.fixture(params=[2], ids=["2 ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def plan_of(
    module: nn.Module,
    *inputs: Any,
    dynamic: bool = True,
    axis: str = "batch",
    exact: Certificate | None = None,
) -> tuple[slicing.Plan, set[str]]:
    """The plan, and the names of all collectives."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        captured = capture.to_aten(gm).gm
        functionalize(captured.graph)
        starts = {node.name for node in captured.graph.nodes if collectives.is_start(node)}
        found.append((ANALYSES[axis](captured, exact=exact), starts))
        raise Stop

    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(
            capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
        ),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised,
    ):
        torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    if isinstance(raised.value.inner_exception, PassError):
        raise raised.value.inner_exception
    return found[0]


def layer(steps: routed.Steps, ranks: int) -> routed.Layer:
    return routed.Layer(steps, ranks, dist.group.WORLD.group_name)


def check_sliced(module: nn.Module, dynamic: bool, axis: str = "batch") -> None:
    """Every collective is sliced; along experts, all but the exchange of counts."""
    plan, starts = plan_of(module, torch.randn(4, 6, routed.D), dynamic=dynamic, axis=axis)
    assert not plan.remarks, [r.message for r in plan.remarks]
    whole = starts - set(plan.sliced_starts)
    assert whole == ({"all_to_all_single"} if axis == "expert" else set())


@pytest.mark.parametrize("axis", ANALYSES)
@pytest.mark.parametrize("name", routed.RIGHT)
def test_spelling_is_proven(name: str, axis: str, ranks: int) -> None:
    check_sliced(layer(routed.RIGHT[name], ranks), dynamic=True, axis=axis)


@pytest.mark.parametrize("axis", ANALYSES)
@pytest.mark.parametrize("name", ["scatter_add", "eq", "inverse_back", "labels", "grouped"])
def test_spelling_is_proven_with_literal_sizes(name: str, axis: str, ranks: int) -> None:
    check_sliced(layer(routed.RIGHT[name], ranks), dynamic=False, axis=axis)


@pytest.mark.parametrize("name", ["scatter_add", "map", "labels"])
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_spelling_is_proven_on_four_ranks(name: str, ranks: int) -> None:
    check_sliced(layer(routed.RIGHT[name], ranks), dynamic=True)


@pytest.mark.parametrize("rows", [0, 1])
def test_plan_does_not_depend_on_a_ranks_rows(rows: int, ranks: int) -> None:
    """Sizes 0 and 1 are literals even where others are symbols; peers may have other sizes."""
    plan, starts = plan_of(layer(routed.RIGHT["labels"], ranks), torch.randn(rows, 6, routed.D))
    assert not plan.remarks and set(plan.sliced_starts) == starts


@pytest.mark.parametrize("axis", ["token", "expert"])
@pytest.mark.parametrize("name", ["even_splits", "position_ids"])
def test_program_without_an_island_is_refused(name: str, axis: str, ranks: int) -> None:
    steps, _ = routed.WRONG[name]
    with pytest.raises(PassError, match="there is no island to slice"):
        plan_of(layer(steps, ranks), torch.randn(4, 6, routed.D), axis=axis)


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        (name, axis)
        for name in routed.WRONG
        for axis in ANALYSES
        if axis == "batch" or name not in ("even_splits", "position_ids")
    ],
)
def test_wrong_exchange_is_left_whole(name: str, axis: str, ranks: int) -> None:
    steps, reason = routed.WRONG[name]
    plan, _ = plan_of(layer(steps, ranks), torch.randn(4, 6, routed.D), axis=axis)
    assert plan.sliced_starts == ()
    assert any(reason in remark.message for remark in plan.remarks), plan.remarks


# ---- numerics='exact' ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scatter_add", "labels", "put_back", "top_8", "grouped", "titan"])
def test_islands_of_experts_need_no_certificate(name: str, ranks: int) -> None:
    module = layer(routed.RIGHT[name], ranks)
    plan, starts = plan_of(module, torch.randn(4, 6, routed.D), axis="expert", exact=NONE)
    assert not plan.remarks and plan.is_exact and not plan.reassociated
    assert starts - set(plan.sliced_starts) == {"all_to_all_single"}


INEXACT: dict[str, tuple[routed.Steps, str]] = {
    "shared_weight": (
        routed.Steps(experts=routed.shared_weight),
        "uses router_DE for the rows of several experts",
    ),
    "silu_of_all": (routed.Steps(experts=routed.silu_of_all), "silu in float32 is not certified"),
    "norm_of_all": (
        routed.Steps(before=lambda rows: rows.softmax(-1)),
        "softmax of 8 elements in float32 is not certified",
    ),
    "dropout": (
        routed.Steps(before=lambda rows: F.dropout(rows, 0.5)),
        "draws random numbers",
    ),
}


@pytest.mark.parametrize("name", INEXACT)
def test_island_that_changes_bits_is_left_whole(name: str, ranks: int) -> None:
    steps, reason = INEXACT[name]
    x = torch.randn(4, 6, routed.D)
    plan, _ = plan_of(layer(steps, ranks), x, axis="expert", exact=NONE)
    assert plan.sliced_starts == ()
    assert any(reason in remark.message for remark in plan.remarks), plan.remarks
    plan, _ = plan_of(layer(steps, ranks), x, axis="expert")
    assert plan.sliced_starts


def test_the_certificate_lets_functions_of_several_experts_pass(ranks: int) -> None:
    vouched = dataclasses.replace(
        NONE, environment={"device": "fake"}, elementwise={"float32": {"silu": 8}}
    )
    module = layer(INEXACT["silu_of_all"][0], ranks)
    plan, _ = plan_of(module, torch.randn(4, 6, routed.D), axis="expert", exact=vouched)
    assert plan.sliced_starts
    vouched = dataclasses.replace(vouched, elementwise={"float32": {"silu": 16}})
    plan, _ = plan_of(module, torch.randn(4, 6, routed.D), axis="expert", exact=vouched)
    assert not plan.sliced_starts


class TwoLayers(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.first = layer(INEXACT["silu_of_all"][0], ranks)
        self.second = layer(routed.RIGHT["scatter_add"], ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_other_islands_are_sliced_all_the_same(ranks: int) -> None:
    plan, starts = plan_of(TwoLayers(ranks), torch.randn(4, 6, routed.D), axis="expert", exact=NONE)
    assert len(starts) == 6 and len(plan.sliced_starts) == 2 and len(plan.islands) == 1
    assert [remark.node.name for remark in plan.remarks] == ["silu"]


@pytest.mark.parametrize("axis", ["batch", "token"])
def test_routed_rows_are_not_sliced_exactly(axis: str, ranks: int) -> None:
    module = layer(routed.RIGHT["scatter_add"], ranks)
    plan, _ = plan_of(module, torch.randn(4, 6, routed.D), axis=axis, exact=NONE)
    assert plan.sliced_starts == ()
    assert any("use axis='expert'" in remark.advice for remark in plan.remarks), plan.remarks


def test_sums_over_slices_are_listed_once_per_parameter(ranks: int) -> None:
    module = layer(routed.RIGHT["scatter_add"], ranks)
    plan, _ = plan_of(module, torch.randn(4, 6, routed.D))
    assert sorted(plan.reassociated) == ["gradient of experts_LDD", "gradient of router_DE"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("names", "batches", "slices"),
    [
        # Of another size per rank; fewer rows than slices; none at all.
        (("scatter_add",), ((5, 4), (2, 9), (0, 4)), 3),
        (("labels", "put_back", "in_groups", "top_8"), ((5, 4),), 2),
        pytest.param(
            ("mean_of_rows", "capacity", "descending"), ((5, 4),), 2, marks=pytest.mark.slow
        ),
    ],
    ids=["batches", "right", "wrong"],
)
def test_layer_on_two_ranks(
    names: tuple[str, ...], batches: tuple[tuple[int, ...], ...], slices: int
) -> None:
    for rank in run_ranks(routed.compare_on_ranks, 2, names, batches, slices, timeout_s=240):
        assert all(num_sliced for num_sliced, _ in rank)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("axis", "names", "slices"),
    [
        pytest.param("token", ("scatter_add", "capacity"), 3, marks=pytest.mark.slow),
        pytest.param("expert", ("onehot", "mean_of_rows"), 3, marks=pytest.mark.slow),
        pytest.param("token", ("labels", "put_back", "top_8"), 3, marks=pytest.mark.slow),
        pytest.param("expert", ("scatter_add", "labels", "put_back"), 2, marks=pytest.mark.slow),
        pytest.param("expert", ("top_8", "grouped", "titan"), 2, marks=pytest.mark.slow),
    ],
)
def test_islands_on_two_ranks(axis: str, names: tuple[str, ...], slices: int) -> None:
    """Along experts bitwise; a rank has rows for some slices, or none at all."""
    batches = ((5, 4), (1, 9), (0, 4))
    for rank in run_ranks(routed.compare_on_ranks, 2, names, batches, slices, axis, timeout_s=240):
        sliced = [num_sliced > 0 for num_sliced, _ in rank]
        assert sliced == [name in routed.RIGHT for name in names]


@pytest.mark.dist
@pytest.mark.parametrize("name", ["scatter_add", pytest.param("titan", marks=pytest.mark.slow)])
def test_islands_of_experts_are_exact_on_two_ranks(name: str) -> None:
    """Bit by bit, with odd rows and none, and no certificate."""
    batches = ((5, 4), (0, 3))
    for rank in run_ranks(routed.compare_on_ranks, 2, (name,), batches, 2, "expert", True):
        assert all(num_sliced for num_sliced, _ in rank)


@pytest.mark.dist
def test_batches_share_one_compile() -> None:
    # The first is of no other size of the layer: Dynamo takes equal sizes for one.
    batches = ((9, 9), (8, 6), (6, 5), (5, 7), (7, 8))
    for rank in run_ranks(routed.compare_on_ranks, 2, ("scatter_add",), batches, 2):
        assert [num_compiles for _, num_compiles in rank] == [1]
