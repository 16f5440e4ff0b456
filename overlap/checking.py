"""`check_steps=k`: the first k steps run both ways, and the first differing value stops the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from overlap.errors import OverlapError


class MismatchError(OverlapError):
    """The scheduled program and the program as written disagree."""


RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of the largest value of the tensor: what reassociated sums may differ by."""


@dataclasses.dataclass
class Checked:
    """Calls `compiled`; in the first `steps` calls also `reference`, and compares.

    Raises MismatchError, naming the first output or gradient that differs. Both programs run the
    same collectives on every rank, so all ranks check in step. With `is_exact`, bit by bit.
    """

    compiled: Callable[..., Any]
    reference: Callable[..., Any]
    steps: int
    is_exact: bool = False

    def __call__(self, *inputs: Any) -> Any:
        if self.steps == 0:
            return self.compiled(*inputs)
        self.steps -= 1
        if not torch.is_grad_enabled():
            copies = [_copy(value) for value in inputs]
            outputs = self.compiled(*inputs)
            _compare("output", outputs, self.reference(*copies), self.is_exact)
            return outputs
        return _BothWays.apply(self.compiled, self.reference, self.is_exact, *inputs)


def _copy(value: Any) -> Any:
    """A separate value, so that a buffer that both ways write is written once."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: Any, reference: Any, is_exact: bool, *inputs: Any) -> Any:
        copies = [_copy(value) for value in inputs]
        own = [_leaf(value) for value in inputs]
        with torch.enable_grad():
            outputs, expected = compiled(*own), reference(*copies)
        _compare("output", outputs, expected, is_exact)
        ctx.is_exact = is_exact
        ctx.own, ctx.copies, ctx.outputs, ctx.expected = own, copies, outputs, expected
        results = [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs]
        pairs = zip(results, outputs, strict=True)
        ctx.mark_non_differentiable(
            *(r for r, o in pairs if isinstance(o, torch.Tensor) and not o.requires_grad)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        gradients = _gradients(ctx.outputs, ctx.own, tangents)
        expected = _gradients(ctx.expected, ctx.copies, tangents)
        _compare("gradient", gradients, expected, ctx.is_exact)
        return None, None, None, *gradients


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _gradients(outputs: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    pairs = [
        (output, tangent)
        for output, tangent in zip(outputs, tangents, strict=True)
        if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    wanted = [v for v in inputs if isinstance(v, torch.Tensor) and v.requires_grad]
    found = torch.autograd.grad(
        [output for output, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True
    )
    by_id = {id(value): gradient for value, gradient in zip(wanted, found, strict=True)}
    return [by_id.get(id(value)) for value in inputs]


def _compare(what: str, values: Sequence[Any], expected: Sequence[Any], is_exact: bool) -> None:
    for i, (value, other) in enumerate(zip(values, expected, strict=True)):
        if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
            if value is not other and value != other:
                raise MismatchError(f"{what} {i}: expected {other!r}, found {value!r}")
            continue
        tolerance = 0.0 if is_exact else RELATIVE_TOLERANCE.get(value.dtype, 0.0)
        limit = tolerance * other.detach().abs().max().item() if other.numel() else 0.0
        difference = (value.detach() - other.detach()).abs()
        worst = difference.max().item() if difference.numel() else 0.0
        if not worst <= limit:
            raise MismatchError(
                f"{what} {i} differs from the program as written by {worst:.3g}, more than "
                f"rounding explains ({limit:.3g}); please report it, and set OVERLAP_DISABLE=1 "
                "to go on without overlap"
            )
