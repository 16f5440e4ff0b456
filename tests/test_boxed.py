"""Graphs as functions that take their inputs as one list."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from overlap import backend


def lazy_graph() -> fx.GraphModule:
    """One that is compiled when it is first called, as AOTAutograd's are."""
    with _use_lazy_graph_module(True):
        return make_fx(lambda x: x + 1)(torch.ones(2))


def test_inputs_are_freed_and_other_graphs_stay_as_they_are() -> None:
    own, other = lazy_graph(), lazy_graph()
    run = backend.boxed_callable(own)
    inputs: list[Tensor] = [torch.ones(2)]
    [result] = [run(inputs)]
    assert result.equal(torch.full((2,), 2.0)) and not inputs
    assert getattr(run, "_boxed_call", False)
    assert not hasattr(other.forward, "_boxed_call")
    assert other(torch.ones(2)).equal(torch.full((2,), 2.0))
