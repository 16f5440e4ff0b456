"""Make small graphs for tests: no process group, no rank, no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

c10d = torch.ops._c10d_functional


def trace(function: Callable[..., Any], *inputs: torch.Tensor, symbolic: bool = False):
    """The pre-dispatch ATen graph of `function`; groups in it are names that need not exist."""
    mode = "symbolic" if symbolic else "fake"
    return make_fx(function, tracing_mode=mode, pre_dispatch=True)(*inputs)


def find(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def all_to_all(x: torch.Tensor, group: str = "ep") -> torch.Tensor:
    """An all-to-all between two ranks, in flight."""
    return c10d.all_to_all_single(x, [x.shape[0] // 2] * 2, [x.shape[0] // 2] * 2, group)


def wait(x: torch.Tensor) -> torch.Tensor:
    return c10d.wait_tensor(x)
