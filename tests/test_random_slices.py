"""Random programs of rows, sums, shape changes and whole values give the same sliced and whole.

The grammar is small on purpose: what counts is how operators meet, not how many there are. Programs
run on fake sizes only while they are traced; each runs as 1, 2 and 3 slices, forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from overlap import slicing
from overlap.instantiate import instantiate
from tests.tracing import trace

B, S, D = 5, 2, 3
"""B is odd, so that cuts are uneven; programs start from x of [B, S, D]."""

Step = Callable[[list[Tensor], Tensor], Tensor]


def same_shape(values: list[Tensor], y: Tensor) -> Tensor:
    return next((v for v in reversed(values[:-1]) if v.shape == y.shape), y)


def reduced(keep: bool, at: int, how: str) -> Step:
    def step(values: list[Tensor], y: Tensor) -> Tensor:
        if not y.dim():
            return y
        dim = at % y.dim()
        return y.amax(dim, keep) if how == "amax" else getattr(y, how)(dim, keepdim=keep)

    return step


def moved(at: int, how: str) -> Step:
    def step(values: list[Tensor], y: Tensor) -> Tensor:
        if y.dim() < 2:
            return y
        a, b = at % y.dim(), (at + 1) % y.dim()
        match how:
            case "transpose":
                return y.transpose(a, b)
            case "flatten":
                return y.flatten(min(a, b), max(a, b))
            case "softmax":
                return y.softmax(a)
            case "cumsum":
                return y.cumsum(a)
            case "flip":
                return y.flip(a)
            case "unsqueeze":
                return y.unsqueeze(a)
            case "select":
                return y.select(a, 0)
            case "narrow":
                return y.narrow(a, 0, max(1, y.shape[a] - 1))
            case "chunk":
                return y.chunk(2, a)[0]
            case "sort":
                return y.sort(a).values
            case "reshape":
                return y.reshape(y.shape[0], -1) if a else y.reshape(-1, y.shape[-1])
            case "cat":
                return torch.cat([y, same_shape(values, y)], a)
            case _:
                return torch.stack([y, same_shape(values, y)], a)

    return step


def whole(at: int) -> Step:
    """Meets a value that every slice shares: of all of the last dims, or of one."""

    def step(values: list[Tensor], y: Tensor) -> Tensor:
        if not y.dim():
            return y * 2
        table = torch.arange(y.numel()).view(y.shape).to(y.dtype) / y.numel()
        dims = at % (y.dim() + 1)
        while dims:
            table, dims = table[0], dims - 1
        return y * table + y.shape[0]

    return step


def product(values: list[Tensor], y: Tensor) -> Tensor:
    if y.dim() < 1:
        return y
    weight = torch.linspace(-1, 1, y.shape[-1] * 2, dtype=y.dtype).view(y.shape[-1], 2)
    return y @ weight


def gram(values: list[Tensor], y: Tensor) -> Tensor:
    return y @ y.transpose(-1, -2) if y.dim() >= 2 else y


def mixed(values: list[Tensor], y: Tensor) -> Tensor:
    """Meets an earlier value of the same shape, or the sum of one."""
    other = same_shape(values, y)
    return y + other if other is not y else y + values[0].sum()


def written(values: list[Tensor], y: Tensor) -> Tensor:
    z = y * 1
    if z.dim():
        z[..., 0].add_(1)
    return z


STEPS = st.one_of(
    st.sampled_from([lambda v, y: y.tanh(), lambda v, y: y * y, product, gram, mixed, written]),
    st.builds(
        reduced, st.booleans(), st.integers(0, 3), st.sampled_from(["sum", "mean", "amax", "var"])
    ),
    st.builds(
        moved,
        st.integers(0, 3),
        st.sampled_from(
            (
                "transpose",
                "flatten",
                "softmax",
                "cumsum",
                "flip",
                "unsqueeze",
                "select",
                "narrow",
                "chunk",
                "sort",
                "reshape",
                "cat",
                "stack",
            ),
        ),
    ),
    st.builds(whole, st.integers(0, 3)),
)


def program_of(steps: list[Step]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x]
        for step in steps:
            y = step(values, values[-1])
            values.append(y if y.numel() < 2000 else y.flatten()[:7])
        return values[-1], values[len(values) // 2]

    return program


def run(gm: fx.GraphModule) -> list[Tensor]:
    x = torch.linspace(-1, 1, B * S * D).sin().mul(3).view(B, S, D).double().requires_grad_()
    outputs = gm(x)
    weights = [torch.linspace(0.5, 1.5, y.numel()).double().view(y.shape) for y in outputs]
    sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()
    return [*(y.detach() for y in outputs), x.grad]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(STEPS, min_size=1, max_size=7), st.booleans())
def test_sliced_program_is_the_program(steps: list[Step], symbolic: bool) -> None:
    x = torch.randn(B, S, D, dtype=torch.float64)
    gm = trace(program_of(steps), x, symbolic=symbolic)
    expected = run(gm)
    plan = slicing.prove(gm)
    for slices in (2, 3):
        sliced = fx.GraphModule(gm, gm.graph)
        instantiate(sliced, plan, slices)
        for y, z in zip(run(sliced), expected, strict=True):
            torch.testing.assert_close(y, z, rtol=1e-9, atol=1e-9, equal_nan=True)
