"""The backward of a step whose gradients were computed in its forward, for a tangent of 1.

    gathered = all_gather(tangent)      one element; per group through which gradients were added
    factor   = factor_of(tangent, gathered, groups)
    dw       = scaled(dw of tangent 1, factor)

The backward is linear in the tangents of all ranks: where it exchanges values, a rank's gradient is
a sum over ranks, each term times that rank's own tangent. One factor for the sum is right only if
the tangents are equal, so the ranks compare them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _autograd

from overlap.errors import DivergenceError


def factor_of(tangent: Tensor, gathered: Sequence[Tensor], groups: Sequence[str]) -> Tensor | None:
    """What gradients of tangent 1 are multiplied by: a 0-d tensor, or None where they are right as
    they are.

    gathered: for each of `groups`, the tangents of its ranks, [ranks].

    Raises DivergenceError if they differ. On a device nothing reads them, so as not to stall it:
    the factor is then NaN, and so is every gradient.
    """
    if tangent.device.type != "cpu":
        for of_ranks_R in gathered:
            is_equal = (of_ranks_R == of_ranks_R[0]).all()
            tangent = torch.where(is_equal, tangent, math.nan)
        return tangent
    for group, of_ranks_R in zip(groups, gathered, strict=True):
        _check_equal(group, of_ranks_R.tolist())
    # Of a graph that is kept, another backward hands the same tensors out again.
    is_kept = _autograd._get_current_graph_task_keep_graph()
    return None if tangent.item() == 1 and not is_kept else tangent


def scaled(gradient: Tensor, factor: Tensor | None) -> Tensor:
    """The gradient times the factor, in its own dtype; the same tensor for None."""
    return gradient if factor is None else (gradient * factor).to(gradient.dtype)


def copied_if_same(gradient: Tensor, factor: Tensor | None) -> Tensor:
    """`scaled`, and never the same tensor: for one that others hold as well."""
    return gradient.clone() if factor is None else scaled(gradient, factor)


def _check_equal(group: str, tangents: Sequence[float]) -> None:
    if any(one != tangents[0] for one in tangents) and not any(map(math.isnan, tangents)):
        raise DivergenceError(
            f"the ranks of group {group!r} scale their losses differently: {tangents}; with "
            "whole_step=True gradients of several ranks are added before they are scaled, so weigh "
            "the loss inside the compiled function, or set whole_step=False"
        )
