"""In-place operators become out-of-place ones where nothing else sees the write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from overlap.passes.functionalize import functionalize
from tests.tracing import trace


def written(gm: fx.GraphModule) -> list[str]:
    """Names of the calls that still write in place."""
    return [
        node.name
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]


def chain(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1).mul_(x)
    return y.relu_() + y


def accumulate(x: Tensor) -> Tensor:
    zeros = torch.zeros_like(x)
    zeros.index_add_(0, torch.tensor([1, 0, 2]), x)
    return zeros.view(-1)[:2]


def keeps_dtype(x: Tensor) -> Tensor:
    y = x.bfloat16()
    y.add_(x / 3)
    return y


def copies(x: Tensor) -> Tensor:
    y = torch.empty(3, 4, dtype=torch.float64)
    y.copy_(x[0])
    return y + 1


def dead_view(x: Tensor) -> Tensor:
    y = x * 2
    early = y.view(-1) + 1
    y.add_(1)
    return y + early.view(3, 4)


def view_then_base(x: Tensor) -> Tensor:
    y = x * 2
    y.view(-1).add_(1)
    return y + 1


def base_then_view(x: Tensor) -> Tensor:
    y = x * 2
    view = y.view(-1)
    y.add_(1)
    return view + 1


def view_of_written(x: Tensor) -> Tensor:
    """The second write goes through a view of the value that the first write made."""
    y = x * 2
    y.add_(1)
    y.view(-1).mul_(3)
    return y + 1


def written_input(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@pytest.mark.parametrize("program", [chain, accumulate, keeps_dtype, copies, dead_view])
def test_write_is_replaced(program: Callable[[Tensor], Tensor]) -> None:
    check(program, [])


@pytest.mark.parametrize(
    ("program", "left"),
    [
        (view_then_base, ["add_"]),
        (base_then_view, ["add_"]),
        (view_of_written, ["mul_"]),
        (written_input, ["add_"]),
    ],
)
def test_write_that_others_see_is_left(
    program: Callable[[Tensor], Tensor], left: list[str]
) -> None:
    check(program, left)


def check(program: Callable[[Tensor], Tensor], left: list[str]) -> None:
    x = torch.randn(3, 4)
    gm = trace(program, x)
    expected = program(x.clone())
    functionalize(gm.graph)
    gm.recompile()
    gm.graph.lint()
    assert written(gm) == left
    found = gm(x.clone())
    assert found.dtype == expected.dtype and torch.equal(found, expected)
