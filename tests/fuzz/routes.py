"""Random routed layers: one that `tests.routed` spells out, with some of its steps swapped for
others, right or wrong, and dense steps before it.

Swapped steps need not fit together. What then fails as written is no program; what runs is one,
whatever it computes, and its slices have to compute the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests import routed
from tests.fuzz import dense

BASES = tuple(routed.RIGHT.values())
_ALL = (*BASES, *(steps for steps, _ in routed.WRONG.values()))
_FIELDS = [field.name for field in dataclasses.fields(routed.Steps)]
SWAPS: tuple[tuple[str, Any], ...] = tuple(
    (name, way) for name in _FIELDS for way in dict.fromkeys(getattr(s, name) for s in _ALL)
)
"""A step by its field, and a way to spell it."""


class _Layer(SimpleNamespace):
    """`tests.routed.Layer` of parameters that are arguments."""

    forward = routed.Layer.forward
    exchange = routed.Layer.exchange


def parameter_shapes() -> tuple[tuple[int, ...], ...]:
    """Of the parameters: the router's, the experts' of this rank, the dense steps'."""
    local = routed.E // dense.NUM_RANKS
    return (routed.D, routed.E), (local, routed.D, routed.D), (256,)


def function_of(steps: tuple[tuple[str, int], ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The program of x [B, S, D] and the parameters; `steps` are ("base", i), ("swap", i) and dense
    ones."""
    chosen, around = routed.Steps(), list[tuple[str, int]]()
    for name, k in steps:
        match name:
            case "base":
                chosen = BASES[k % len(BASES)]
            case "swap":
                chosen = dataclasses.replace(chosen, **dict([SWAPS[k % len(SWAPS)]]))
            case _:
                around.append((name, k))
    group: Any = dist.group.WORLD

    def program(x: Tensor, router_DE: Tensor, experts_LDD: Tensor, weight_P: Tensor):
        state = dense.State([x], weight_P)
        for name, k in around:
            y = dense.STEPS[name](state, state.values[-1], k)
            state.values.append(y if y.shape == x.shape else state.values[-1])
        layer = _Layer(
            steps=chosen,
            ranks=dense.NUM_RANKS,
            group=group.group_name,
            router_DE=router_DE,
            experts_LDD=experts_LDD,
        )
        return (layer.forward(state.values[-1]),)

    return program
