"""What has a backward of its own, checkpoints, hooks: the sliced program gives what was written, or
the program is not sliced and says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from overlap import capture
from tests.sliced import Slicer, compare
from tests.test_soundness import Body, rows


class FlipsGradient(torch.autograd.Function):
    """Row by row forwards; its backward swaps rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0) * 2


class AddsLoss(torch.autograd.Function):
    """Passes `x` on and gives `loss` a gradient: how an auxiliary loss is attached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


@torch.library.custom_op("overlap_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: grad.flip(0) * 2)


@torch.library.custom_op("overlap_tests::scaled_in_place", mutates_args=("x",))
def scaled_in_place(x: Tensor) -> None:
    x.mul_(3)


def with_function(m: Body, x: Tensor) -> Tensor:
    return FlipsGradient.apply(x @ m.w)


def with_attached_loss(m: Body, x: Tensor) -> Tensor:
    scores = (x @ m.w).softmax(-1)
    return AddsLoss.apply(x * scores, scores.mean((0, 1)).square().sum())


def with_custom_op(m: Body, x: Tensor) -> Tensor:
    return doubled(x @ m.w) + 1


def with_writing_op(m: Body, x: Tensor) -> Tensor:
    y = (x @ m.w).detach()
    scaled_in_place(y)
    return y + x


def with_hook(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    y.register_hook(lambda grad: grad.flip(0))
    return y * 2


def with_input_hook(m: Body, x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad.flip(0))
    return x @ m.w


def with_checkpoint(m: Body, x: Tensor) -> Tensor:
    return checkpoint(lambda y: F.relu(y @ m.w) @ m.w, x, use_reentrant=False) + x


def save_products() -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def with_selective_checkpoint(m: Body, x: Tensor) -> Tensor:
    return checkpoint(
        lambda y: F.relu(y @ m.w) @ m.w, x, use_reentrant=False, context_fn=save_products
    )


def with_counting_checkpoint(m: Body, x: Tensor) -> Tensor:
    def block(y: Tensor) -> Tensor:
        y = y @ m.w
        m.steps.add_(1)
        return F.relu(y) @ m.w

    return checkpoint(block, x, use_reentrant=False)


def with_vmap(m: Body, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row @ m.w)(x)


def with_cond(m: Body, x: Tensor) -> Tensor:
    y = x @ m.w
    return torch.cond(y.sum() > 0, lambda z: z * 2, lambda z: z * 3, (y,))


def with_dropout(m: Body, x: Tensor) -> Tensor:
    return F.dropout(x @ m.w, 0.5, True)


BATCHES = [rows(5)]


# Dynamo instantiates the class of an autograd.Function, which torch itself warns of.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
@pytest.mark.parametrize("fn", [with_function, with_attached_loss])
def test_a_backward_of_its_own_leaves_the_program_whole(fn: Any) -> None:
    slicer = compare(Body(fn), BATCHES)
    assert slicer.plan is None
    assert "test_capture.py" in slicer.error and "autograd.Function" in slicer.error


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("fn", "operator"),
    [
        (with_custom_op, "overlap_tests.doubled"),
        (with_cond, "torch.cond"),
    ],
)
def test_an_unknown_operator_is_computed_once(fn: Any, operator: str) -> None:
    assert operator in compare(Body(fn), BATCHES).refused


def test_what_a_custom_operator_writes_is_computed_once() -> None:
    assert compare(Body(with_writing_op), BATCHES).refused


def test_a_hook_inside_leaves_the_program_whole() -> None:
    slicer = compare(Body(with_hook), BATCHES)
    assert slicer.plan is None
    assert "a tensor hook (test_capture.py:" in slicer.error


def test_a_hook_on_an_input_sees_the_whole_gradient() -> None:
    compare(Body(with_input_hook), BATCHES)


@pytest.mark.parametrize("fn", [with_checkpoint, with_selective_checkpoint])
def test_checkpoints_are_sliced(fn: Any) -> None:
    slicer = compare(Body(fn), BATCHES)
    assert not slicer.refused and slicer.num_sliced


def test_a_counter_in_a_checkpoint_counts_once() -> None:
    """Un-compiled, the recomputation counts again; compiled, sliced or not, it does not."""
    torch._dynamo.reset()
    module = Body(with_counting_checkpoint)
    compiled = torch.compile(module, backend=Slicer((3,)), fullgraph=True)
    compiled(*rows(5)).sum().backward()
    assert module.steps == 1


def test_checkpoint_nodes_know_their_region() -> None:
    slicer = compare(Body(with_checkpoint), BATCHES, slices=(2,))
    regions = {n.name: capture.checkpoint_region(n) for n in slicer.plan.decisions}
    assert regions["relu"] == 0 and regions["add"] is None


def test_what_does_not_trace_is_left_whole() -> None:
    slicer = compare(Body(with_vmap), BATCHES)
    assert slicer.plan is None
    assert "(test_capture.py:" in slicer.error


def test_dropout_is_noted() -> None:
    torch._dynamo.reset()
    module = Body(with_dropout)
    slicer = Slicer((2,))
    torch.compile(module, backend=slicer, fullgraph=True)(*rows(4))
    notes = [d.note for d in slicer.plan.decisions.values() if d.note]
    assert notes == [
        "each slice draws its own random numbers, other ones than the program as written"
    ]


def cast_inside_autocast(cast: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """`h.float()` changes nothing before autocast is applied, and something after."""

    def program(m: Body, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.linear(x, m.w)
            y = cast(h) * 2
            z = F.linear(y, m.w)
        return h, z

    return program


CASTS = {
    "method": lambda h: h.float(),
    "function": lambda h: torch.Tensor.float(h),
    "operator": lambda h: torch.ops.aten.to.dtype(h, torch.float32),
}


@pytest.mark.parametrize("is_ambient", [False, True])
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_under_autocast_keeps_its_operand(cast: str, is_ambient: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_ambient):
        compare(Body(cast_inside_autocast(CASTS[cast])), [rows(4), rows(6)], rtol=2e-2)
