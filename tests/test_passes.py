"""The passes after autograd, each on a small traced program: the graph it makes, and its meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from overlap import exactness, graph, hardware, pipeline, printing
from overlap.capture import CHECKPOINT_KEY
from overlap.config import Config
from overlap.graph import Phase
from overlap.passes.legalize import Legalize
from overlap.passes.merge_wgrad import Inexact, MergeWgrad
from overlap.passes.normalize import Normalize
from overlap.passes.recompute import Policies, Recompute
from overlap.passes.schedule import MemoryCap, Schedule, start_order
from tests.tracing import all_to_all, c10d, find, wait


def trace(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The ATen graph of `function` as autograd leaves it, in phase JOINT."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    graph.set_phase(gm, Phase.JOINT)
    return gm


def trace_backward(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The same, with every node marked as part of the backward."""
    gm = trace(function, *inputs)
    for node in gm.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    return gm


def context(**options: Any) -> pipeline.Context:
    ctx = pipeline.Context(Config(**options), group_size=lambda _: 2)
    ctx.provide(hardware.with_link(hardware.load("cpu"), 400))
    ctx.provide(MemoryCap(None))
    ctx.provide(Policies({}))
    return ctx


def two_slices(x: Tensor, w: Tensor) -> Tensor:
    """Each slice: a product, an exchange, a product."""
    results = []
    for piece in x.chunk(2):
        sent = wait(all_to_all(piece @ w))
        results.append(sent @ w)
    return torch.cat(results)


def test_normalize_drops_what_undoes_itself() -> None:
    def function(x: Tensor) -> Tensor:
        pieces = torch.ops.aten.split_with_sizes(x, [2, 2])
        whole = torch.cat(pieces)
        return wait(wait(all_to_all(whole)))

    gm = trace(function, torch.zeros(4, 2))
    pipeline.run(gm, [Normalize()], context())
    assert_expected_inline(
        printing.dump(gm),
        """\
     x_1: f32[4,2] = input
,    all_to_all_single: f32[4,2] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
'    wait_tensor: f32[4,2] = wait(all_to_all_single)
     return wait_tensor""",
    )


def test_normalize_stacks_gradients_of_selected_weights() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        select_backward = torch.ops.aten.select_backward
        return select_backward(a, [2, 3], 0, 0) + select_backward(b, [2, 3], 0, 1)

    a, b = torch.randn(3), torch.randn(3)
    gm = trace(function, a, b)
    pipeline.run(gm, [Normalize()], context())
    assert_expected_inline(
        printing.dump(gm),
        """\
     a_1: f32[3] = input
     b_1: f32[3] = input
     stack_default: f32[2,3] = aten.stack([a_1, b_1])
     return stack_default""",
    )
    assert torch.equal(gm(a, b), function(a, b))


def partial_gradients(g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    return (g0.t() @ x0).t() + (g1.t() @ x1).t()


def merged(dtype: torch.dtype) -> tuple[fx.GraphModule, list[Tensor]]:
    inputs = [torch.randn(rows, width, dtype=dtype) for width in (2, 3) for rows in (4, 5)]
    gm = trace_backward(partial_gradients, *inputs)
    for slice_, product in enumerate(
        n for n in gm.graph.nodes if graph.is_call(n, torch.ops.aten.mm)
    ):
        graph.set_tag(product, graph.Tag(slice=slice_))
    pipeline.run(gm, [Normalize(), MergeWgrad()], context())
    return gm, inputs


def test_merge_wgrad_adds_in_the_products() -> None:
    gm, inputs = merged(torch.float32)
    assert_expected_inline(
        printing.dump(gm),
        """\
     g0_1: f32[4,2] = input
     g1_1: f32[5,2] = input
     x0_1: f32[4,3] = input
     x1_1: f32[5,3] = input
     t: f32[2,4] = aten.t(g0_1)
     mm: f32[2,3] = aten.mm(t, x0_1)  # slice=0
     t_2: f32[2,5] = aten.t(g1_1)
     addmm_default: f32[2,3] = aten.addmm(mm, t_2, x1_1)
     t_default: f32[3,2] = aten.t(addmm_default)
     return t_default""",
    )
    torch.testing.assert_close(gm(*inputs), partial_gradients(*inputs))


def test_merge_wgrad_makes_one_product_in_low_precision() -> None:
    gm, inputs = merged(torch.bfloat16)
    assert_expected_inline(
        printing.dump(gm),
        """\
     g0_1: bf16[4,2] = input
     g1_1: bf16[5,2] = input
     x0_1: bf16[4,3] = input
     x1_1: bf16[5,3] = input
     cat_default: bf16[9,2] = aten.cat([g0_1, g1_1], 0)
     t_default: bf16[2,9] = aten.t(cat_default)
     cat_default_1: bf16[9,3] = aten.cat([x0_1, x1_1], 0)
     mm_default: bf16[2,3] = aten.mm(t_default, cat_default_1)
     t_default_1: bf16[3,2] = aten.t(mm_default)
     return t_default_1""",
    )
    in_double = partial_gradients(*(x.double() for x in inputs))
    torch.testing.assert_close(gm(*inputs), in_double.bfloat16())


def uses_of_one_weight(g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    """Two uses, a product per slice each, in the order in which autograd adds them."""
    return g1.t() @ x1 + g0.t() @ x0 + g1.t() @ (x1 * 2) + g0.t() @ (x0 * 2)


def uses_of_one_bias(g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    rows = torch.ops.aten.sum.dim_IntList
    return rows(x1, [0]) + rows(x0, [0]) + rows(x1 * 2, [0]) + rows(x0 * 2, [0])


def nested_uses(g0: Tensor, g1: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    return (g1.t() @ x1 + g0.t() @ x0) + (g1.t() @ (x1 * 2) + g0.t() @ (x0 * 2))


def exactly_merged(
    uses: Callable[..., Tensor], slices: Sequence[int] = (1, 0, 1, 0)
) -> tuple[Tensor, list[Tensor], Inexact | None]:
    """What is computed, the joined inputs, and what is left to say."""
    g0, g1, x0, x1 = inputs = [torch.randn(rows, width) for width in (7, 9) for rows in (40, 53)]
    gm = trace_backward(uses, *inputs)
    summing = (torch.ops.aten.mm, torch.ops.aten.sum)
    for node, slice_ in zip(
        (n for n in gm.graph.nodes if graph.is_call(n, *summing)), slices, strict=True
    ):
        graph.set_tag(node, graph.Tag(slice=slice_))
    ctx = context()
    pipeline.run(gm, [Normalize(), MergeWgrad(exact_slices=2)], ctx)
    return gm(*inputs), [torch.cat([g0, g1]), torch.cat([x0, x1])], ctx.take(Inexact)


def test_exact_merge_computes_each_use_of_a_weight_once_on_the_rows_of_the_batch() -> None:
    found, (g, x), inexact = exactly_merged(uses_of_one_weight)
    assert torch.equal(found, g.t() @ x + g.t() @ (x * 2)) and inexact is None


def test_exact_merge_joins_the_rows_of_sums() -> None:
    found, (_, x), inexact = exactly_merged(uses_of_one_bias)
    assert torch.equal(found, x.sum(0) + (x * 2).sum(0)) and inexact is None


@pytest.mark.parametrize(
    ("uses", "slices"),
    [(uses_of_one_weight, (1, 0, 1, 1)), (nested_uses, (1, 0, 1, 0))],
    ids=["another slice", "added in another order"],
)
def test_exact_merge_says_what_still_adds_up_slices(uses: Any, slices: tuple[int, ...]) -> None:
    _, _, inexact = exactly_merged(uses, slices)
    assert inexact is not None and any("add" in name for name in inexact.nodes)


def test_joins_mix_no_slices() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x.relu(), y.relu()]), x.neg() + y.neg()

    gm = trace(function, torch.zeros(2, 3), torch.zeros(2, 3))
    for name, slice_ in (("relu", 0), ("relu_1", 1), ("neg", 0), ("neg_1", 1)):
        graph.set_tag(find(gm, name), graph.Tag(slice=slice_))
    assert [node.name for node in exactness.mixing(gm.graph)] == ["add"]


def test_merge_wgrad_leaves_a_product_that_is_added_twice() -> None:
    def function(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
        twice = g.t() @ x
        return twice + twice + g.t() @ y

    inputs = [torch.randn(4, 2), torch.randn(4, 3), torch.randn(4, 3)]
    gm = trace_backward(function, *inputs)
    pipeline.run(gm, [Normalize(), MergeWgrad()], context())
    torch.testing.assert_close(gm(*inputs), function(*inputs))


def test_merge_wgrad_leaves_one_products_sum_alone() -> None:
    def function(g: Tensor, x: Tensor, other: Tensor) -> Tensor:
        return g.t() @ x + other

    gm = trace_backward(function, torch.zeros(4, 2), torch.zeros(4, 3), torch.zeros(2, 3))
    before = printing.dump(gm)
    pipeline.run(gm, [Normalize(), MergeWgrad()], context())
    assert printing.dump(gm) == before


def test_recompute_saves_collectives_and_says_when_checkpointing_repeats_one() -> None:
    gm = trace(lambda x: wait(all_to_all(x)).relu(), torch.zeros(4, 2))
    ctx = context()
    pipeline.run(gm, [Normalize(), Recompute()], ctx)
    policies = {node.name: graph.recompute_policy(node) for node in gm.graph.nodes}
    assert policies["all_to_all_single"] is CheckpointPolicy.MUST_SAVE
    assert policies["relu"] is None and not ctx.remarks

    for node in gm.graph.nodes:
        graph.annotate(node, CHECKPOINT_KEY, 0)
    pipeline.run(gm, [Recompute()], ctx)
    policies = {node.name: graph.recompute_policy(node) for node in gm.graph.nodes}
    assert policies["all_to_all_single"] is CheckpointPolicy.PREFER_RECOMPUTE
    assert [remark.message for remark in ctx.remarks] == [
        "runs again in the backward, as checkpoint asks"
    ]


def test_schedule_puts_one_slices_product_under_the_others_exchange() -> None:
    gm = trace(two_slices, torch.zeros(512, 256), torch.zeros(256, 256))
    pipeline.run(gm, [Normalize(), Schedule()], context())
    assert_expected_inline(
        printing.dump(gm),
        """\
     x_1: f32[512,256] = input
     w_1: f32[256,256] = input
     split: (f32[256,256], f32[256,256]) = aten.split.Tensor(x_1, 256)
     getitem: f32[256,256] = split[0]
     mm: f32[256,256] = aten.mm(getitem, w_1)
,    all_to_all_single: f32[256,256] = all_to_all(mm, [128, 128], [128, 128]) group=ep
|    getitem_1: f32[256,256] = split[1]
|    mm_2: f32[256,256] = aten.mm(getitem_1, w_1)
|,   all_to_all_single_1: f32[256,256] = all_to_all(mm_2, [128, 128], [128, 128]) group=ep
'|   wait_tensor: f32[256,256] = wait(all_to_all_single)
 |   mm_1: f32[256,256] = aten.mm(wait_tensor, w_1)
 '   wait_tensor_1: f32[256,256] = wait(all_to_all_single_1)
     mm_3: f32[256,256] = aten.mm(wait_tensor_1, w_1)
     cat: f32[512,256] = aten.cat([mm_1, mm_3])
     return cat""",
    )


def test_start_order_depends_on_structure_alone() -> None:
    def routed(x: Tensor, counts: Tensor) -> list[Tensor]:
        """Per slice an exchange of counts, then the rows; traced count by count, row by row."""
        received = [wait(all_to_all(counts + i)) for i in range(2)]
        return [wait(all_to_all(x * r.sum())) for r in received]

    gm = trace(routed, torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    names = [node.name for node in gm.graph.nodes]
    order = [names[i] for i in start_order(gm)["ep"]]
    assert order == [
        "all_to_all_single",
        "all_to_all_single_2",
        "all_to_all_single_1",
        "all_to_all_single_3",
    ]


def test_legalize_gives_in_place_collectives_storages_of_their_own() -> None:
    def function(x: Tensor) -> Tensor:
        first, second = x.clone().chunk(2)
        return wait(c10d.all_reduce_(first, "sum", "dp")) + wait(
            c10d.all_reduce_(second, "sum", "dp")
        )

    gm = trace(function, torch.zeros(4, 2))
    graph.set_phase(gm, Phase.SCHEDULED)
    pipeline.run(gm, [Legalize()], context())
    clones = [node for node in gm.graph.nodes if graph.is_call(node, torch.ops.aten.clone)]
    assert len(clones) == 3


def test_legalize_adds_to_a_product_in_its_own_storage() -> None:
    def function(g: Tensor, x: Tensor) -> Tensor:
        first = g.t() @ x
        return torch.addmm(torch.addmm(first, g.t(), x), g.t(), x)

    gm = legalized(function, torch.randn(4, 2), torch.randn(4, 3))
    in_place = [node for node in gm.graph.nodes if node.target is torch.ops.aten.addmm_.default]
    assert len(in_place) == 2
    g, x = torch.randn(4, 2), torch.randn(4, 3)
    torch.testing.assert_close(gm(g, x), 3 * (g.t() @ x))


def read_again(g: Tensor, x: Tensor) -> Tensor:
    product = g @ x
    return torch.addmm(product, g, x) + product


@pytest.mark.parametrize(
    "function",
    [
        read_again,
        lambda g, x: torch.addmm(x, x, x),
        lambda g, x: torch.addmm((x @ x)[0], x, x),
        lambda g, x: torch.addmm(x @ x, x, x, alpha=2.0),
    ],
    ids=["read again", "an input", "a row", "scaled"],
)
def test_legalize_leaves_what_others_may_read(function: Callable[..., Tensor]) -> None:
    inputs = torch.randn(3, 3), torch.randn(3, 3)
    expected = function(*inputs)
    gm = legalized(function, *inputs)
    targets = [node.target for node in gm.graph.nodes]
    assert torch.ops.aten.addmm_.default not in targets
    torch.testing.assert_close(gm(*inputs), expected)


def legalized(function: Callable[..., Tensor], *inputs: Tensor) -> fx.GraphModule:
    gm = trace(function, *inputs)
    graph.set_phase(gm, Phase.SCHEDULED)
    pipeline.run(gm, [Legalize()], context())
    return gm
