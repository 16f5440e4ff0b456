"""Regions that users mark: names, parts left whole, axes of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap
from overlap import capture, collectives, graph, pipeline, report
from overlap.config import Config
from overlap.errors import ConfigError
from overlap.passes.functionalize import Functionalize
from overlap.passes.slice import Slice, Sliced
from tests import routed, transport_ops
from tests.dist import run_ranks
from tests.sliced import check_same, run

D = routed.D


class Marked(nn.Module):
    """Routed layers, each in a region of its own where it has marks."""

    def __init__(
        self,
        marks: list[dict[str, Any] | None],
        group: str,
        layer: Callable[..., nn.Module] = routed.Layer,
    ) -> None:
        super().__init__()
        steps = routed.Steps()
        self.marks = marks
        self.layers = nn.ModuleList(layer(steps, 2, group) for _ in marks)

    def forward(self, x: Tensor) -> Tensor:
        for i, (layer, marks) in enumerate(zip(self.layers, self.marks, strict=True)):
            if marks is None:
                x = layer(x)
            else:
                with overlap.annotate(f"moe{i}", **marks):
                    x = layer(x)
        return x


class Decorated(nn.Module):
    def __init__(self, forward: Callable[..., Any], group: str) -> None:
        super().__init__()
        self.layer = routed.Layer(routed.Steps(), 2, group)
        self.marked = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.marked(self.layer, x.tanh()) + 1


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest) -> Iterator[str]:
    if "dist" in request.keywords:
        yield ""
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


class Stop(Exception):
    """Ends a compilation when it is sliced."""


def slice_it(
    module: nn.Module, axis: str = "batch", strict: bool = False
) -> tuple[fx.GraphModule, pipeline.Context]:
    found: list[Any] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        captured = capture.to_aten(gm).gm
        ctx = pipeline.Context(Config(strict=strict), lambda name: 2)
        pipeline.run(captured, (Functionalize(), Slice(2, axis)), ctx)
        found.append((captured, ctx))
        raise Stop

    torch._dynamo.reset()
    flags = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(flags), pytest.raises(Exception, match="Stop"):
        torch.compile(module, backend=backend, fullgraph=True, dynamic=True)(torch.randn(4, 6, D))
    return found[0]


def cuts(gm: fx.GraphModule) -> dict[str, list[str]]:
    """By module, the axis of each of its collectives, "" for those that are whole."""
    found: dict[str, list[str]] = {}
    for node in filter(collectives.is_start, gm.graph.nodes):
        found.setdefault(graph.module_path(node), []).append(graph.tag_of(node).region)
    return found


BATCH = ["batch"] * 6
EXPERT = ["", *["expert"] * 4]
TOKEN = ["", *["token"] * 4]
WHOLE = [""] * 3


def test_a_name_is_part_of_the_place(group: str) -> None:
    gm, ctx = slice_it(Marked([{}, None], group))
    assert cuts(gm) == {"layers.0:moe0": BATCH, "layers.1": BATCH}
    assert not ctx.remarks


@pytest.mark.parametrize(
    ("axis", "other"), [("batch", BATCH), ("token", TOKEN), ("expert", EXPERT)]
)
def test_a_region_is_left_whole(axis: str, other: list[str], group: str) -> None:
    gm, ctx = slice_it(Marked([{"slice": False}, None], group), axis, strict=True)
    assert cuts(gm) == {"layers.0:moe0": WHOLE, "layers.1": other}
    inside = [n for n in gm.graph.nodes if graph.module_path(n) == "layers.0:moe0"]
    assert inside and all(graph.tag_of(n).slice is None for n in inside)
    [remark] = ctx.remarks
    assert remark.kind == "note" and remark.module == "layers.0:moe0"
    assert remark.message.startswith(
        "region 'moe0' stays whole, as its annotate(slice=False) asks; the "
    )


@pytest.mark.parametrize("axis", ["batch", "token", "expert"])
def test_an_exchange_that_reaches_into_a_whole_region_is_not_sliced(axis: str, group: str) -> None:
    @overlap.annotate("products", slice=False)
    def products(m: routed.Layer, rows: Tensor, received: Tensor) -> Tensor:
        return routed.loop(m, rows, received)

    module = routed.Layer(routed.Steps(experts=products), 2, group)
    gm, ctx = slice_it(module, axis)
    assert not any(axis for axes in cuts(gm).values() for axis in axes)
    [remark] = ctx.remarks
    assert remark.module == "products"
    assert remark.message == (
        "region 'products' stays whole, as its annotate(slice=False) asks; the exchange is not sliced"
    )


@pytest.mark.parametrize(
    ("marks", "axis", "expected", "axes"),
    [
        ([{"axis": "expert"}, None], "batch", [EXPERT, BATCH], ("expert", "batch")),
        ([None, {"axis": "token"}], "batch", [BATCH, TOKEN], ("token", "batch")),
        ([{"axis": "expert"}, {"axis": "token"}], "batch", [EXPERT, TOKEN], ("expert", "token")),
        ([{"axis": "batch"}, None], "expert", [BATCH, EXPERT], ("expert", "batch")),
        ([None, {"axis": "token"}], "expert", [EXPERT, TOKEN], ("expert", "token")),
    ],
)
def test_a_region_has_an_axis_of_its_own(
    marks: Any, axis: str, expected: list[list[str]], axes: tuple[str, ...], group: str
) -> None:
    gm, ctx = slice_it(Marked(marks, group), axis)
    assert list(cuts(gm).values()) == expected
    assert ctx.fact(Sliced).axes == axes
    assert not ctx.remarks


def test_an_axis_for_a_region_without_an_island_is_remarked(group: str) -> None:
    @overlap.annotate("head", axis="expert")
    def head(layer: routed.Layer, x: Tensor) -> Tensor:
        return x @ layer.router_DE

    module = Decorated(lambda layer, x: layer(x) + head(layer, x), group)
    gm, ctx = slice_it(module)
    assert cuts(gm) == {"layer": BATCH}
    assert [r.message for r in ctx.remarks] == [
        "nothing is sliced along axis 'expert': no all-to-all is split by counts, so there is no "
        "island to slice"
    ]


def test_a_decorated_function(group: str) -> None:
    marked = overlap.annotate("outer", slice=False)(lambda layer, x: layer(x))
    gm, _ = slice_it(Decorated(marked, group))
    assert cuts(gm) == {"layer:outer": WHOLE}


def test_inner_marks_override_outer_ones(group: str) -> None:
    @overlap.annotate("outer", axis="expert")
    def outer(layer: routed.Layer, x: Tensor) -> Tensor:
        with overlap.annotate("inner"):
            return layer(x)

    gm, _ = slice_it(Decorated(outer, group))
    assert cuts(gm) == {"layer:inner": EXPERT}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "annotate expects a name for the region, found 3"),
        (("",), "annotate expects a name for the region, found ''"),
    ],
)
def test_a_region_needs_a_name(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overlap.annotate(*arguments)


def test_an_unknown_axis_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="no value 'rows' of axis for region 'a'; the values are: auto, "
    ):
        overlap.annotate("a", axis="rows")


def test_an_axis_for_what_is_whole_is_an_error() -> None:
    with pytest.raises(ConfigError, match="region 'a' has axis='token' and slice=False"):
        overlap.annotate("a", axis="token", slice=False)


def test_marks_change_nothing_without_a_compiler() -> None:
    with overlap.annotate("a", slice=False):
        assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert overlap.annotate("a")(lambda x: x + 1)(1) == 2


# --- through the backend, on ranks ----------------------------------------------------------------

MIXED = [{"axis": "expert"}, None, {"slice": False}, {"axis": "token"}]


def train(rank: int, ranks: int) -> tuple[str, str, list[str]]:
    module = Marked(MIXED, dist.group.WORLD.group_name, transport_ops.Layer)
    own = copy.deepcopy(module)
    options = {"slices": 2, "axis": "batch"}
    step = torch.compile(own, backend="overlap", fullgraph=True, options=options)
    x = torch.randn(5 - rank, 6, D, generator=torch.Generator().manual_seed(rank))
    check_same(run(own, step, (x,)), run(module, module, (x,)))
    found = report.explain(step)
    return found.axis, str(found), [str(remark) for remark in found.remarks]


def check_mixed(axis: str, text: str, remarks: list[str]) -> None:
    assert axis == "expert, token, batch"
    assert "2 slices along the experts of each rank and the tokens of each exchange and" in text
    assert "layers.0:moe0" in text
    assert [r for r in remarks if "region 'moe2' stays whole" in r]
    assert not [r for r in remarks if "refused" in r]


def test_regions_in_one_process(group: str) -> None:
    check_mixed(*train(0, 2))


@pytest.mark.dist
def test_regions_on_two_ranks() -> None:
    for found in run_ranks(train, 2, timeout_s=280):
        check_mixed(*found)
