"""The pass `simplify`: fewer and smaller operators, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from overlap import pipeline
from overlap.graph import is_call
from overlap.passes.normalize import Normalize
from overlap.passes.simplify import Simplify
from tests.test_passes import context, trace

aten = torch.ops.aten
X = torch.randn(4, 6) * 3
COLUMN = torch.randn(4, 1)


def simplified(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """Names of the operators that are left, once the results are proven to be the same bits."""
    gm = trace(function, *inputs)
    pipeline.run(gm, [Normalize(), Simplify()], context())
    torch.testing.assert_close(gm(*inputs), function(*inputs), rtol=0, atol=0, equal_nan=True)
    return operators(gm)


def operators(gm: fx.GraphModule) -> list[str]:
    return [
        str(node.target.overloadpacket).removeprefix("aten.")
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.detach() + 1, ["add"]),
        (lambda x: (x.neg() ** 1) + 1, ["neg", "add"]),
        (lambda x: x.neg() * 1.0 + 1, ["neg", "add"]),
        (lambda x: x.neg() / 1 + 1, ["neg", "add"]),
        (lambda x: x.t().t() + 1, ["add"]),
        (lambda x: x.expand(4, 6) + 1, ["add"]),
        (lambda x: x.view(24).view(4, 6) + 1, ["add"]),
        (lambda x: x.view(24).view(2, 3, 4).view(12, 2) + 1, ["view", "add"]),
        (lambda x: x.t().reshape(24).view(4, 6) + 1, ["t", "clone", "view", "add"]),
    ],
)
def test_what_changes_nothing_goes(function: Callable[[Tensor], Tensor], left: list[str]) -> None:
    assert simplified(function, X) == left


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x * 2.0 + 1, ["mul", "add"]),
        (lambda x: x.to(torch.int64) * 1.0, ["_to_copy", "mul"]),
        (lambda x: x.view(torch.int32).view(torch.float32), ["view", "view"]),
        (lambda x: torch.div(x, 1, rounding_mode="floor"), ["div"]),
        (lambda x: x.expand(2, 4, 6) + 1, ["expand", "add"]),
        (lambda x: (x * 1.0).add_(1), ["mul", "add_"]),
        (lambda x: x.t() * 1.0 + 1, ["t", "mul", "add"]),
        (lambda x: x.neg() * 1.0, ["neg", "mul"]),
        (lambda x: (torch.complex(x, x / 0).neg() * 1).real + 1, None),
    ],
)
def test_what_changes_something_stays(
    function: Callable[[Tensor], Tensor], left: list[str] | None
) -> None:
    found = simplified(function, X.clone())
    assert left is None or found == left


def test_outputs_stay_apart() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        return x.t().t(), y.t().t(), y.detach()

    assert simplified(function, X) == ["add", "t", "t", "detach"]


@pytest.mark.parametrize("is_left", [False, True])
def test_a_number_is_applied_before_an_expand(is_left: bool) -> None:
    def function(column: Tensor, x: Tensor) -> Tensor:
        wide = column.expand(4, 6) / 6
        return wide * x if is_left else x * wide

    assert simplified(function, COLUMN, X) == ["div", "expand", "mul"]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda column, x: column.expand(4, 6) / 6, ["expand", "div"]),
        (lambda column, x: (column.expand(4, 6) / 6 * x.t().contiguous().t()).view(24), None),
        (lambda column, x: (column.expand(4, 6) * (x[:, ::2].repeat(1, 2) * 2)).view(24), None),
        (lambda column, x: (column.expand(4, 3) * (x[:, ::2] * 2)).view(12), None),
        (lambda column, x: (x[:, ::2] * 1.0).view(12), ["slice", "mul", "view"]),
    ],
    ids=["a result", "columns first", "repeated", "every other", "times one"],
)
def test_strides_stay(function: Callable[..., Tensor], left: list[str] | None) -> None:
    """A result may be written to, and a view of a value stays possible."""
    found = simplified(function, COLUMN, X)
    assert left is None or found == left


@pytest.mark.parametrize("factor", [2.0, -0.5, 1, 1024])
@pytest.mark.parametrize("is_left", [False, True])
def test_a_power_of_two_goes_to_the_smaller_factor(factor: float, is_left: bool) -> None:
    def function(column: Tensor, x: Tensor) -> Tensor:
        wide, scaled = column.expand(4, 6), x * factor
        return scaled * wide if is_left else wide * scaled

    assert simplified(function, COLUMN, X) == ["mul", "expand", "mul"]


def read_twice(column: Tensor, x: Tensor) -> Tensor:
    doubled = x * 2.0
    return column.expand(4, 6) * doubled + doubled


@pytest.mark.parametrize(
    "function",
    [
        lambda column, x: column.expand(4, 6) * (x * 3.0),
        lambda column, x: column.expand(4, 6) / (x * 2.0),
        read_twice,
        lambda column, x: column.expand(4, 6) * (x.to(torch.int64) * 2),
        lambda column, x: column.half().expand(4, 6) * (x * 1024.0),
        lambda column, x: column.to(torch.int8).expand(4, 6) * (x * 2),
    ],
    ids=["no power of two", "a quotient", "read twice", "integers", "half", "bytes"],
)
def test_other_factors_stay(function: Callable[..., Tensor]) -> None:
    before = operators(trace(function, COLUMN, X))
    assert simplified(function, COLUMN, X) == before


def test_the_backward_of_a_norm_has_no_full_size_division() -> None:
    def function(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = torch.rms_norm(x, (6,))
        return torch.autograd.grad(y, x, grad)

    gm = trace(function, X, torch.randn(4, 6))
    pipeline.run(gm, [Normalize(), Simplify()], context())
    sizes = [node.meta["val"].numel() for node in gm.graph.nodes if is_call(node, aten.div)]
    assert sizes and max(sizes) == 4
