"""From Dynamo's graph to the pre-dispatch ATen graph that placements are proven on.

At that level schemas name every argument and say what is mutated, Python composites are expanded,
linear, attention, norms and cross-entropy are still whole, and autograd has yet to come. See
docs/adr/0002-pre-dispatch-aten-level.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from overlap import graph
from overlap.errors import OverlapError

CHECKPOINT_KEY = "overlap_checkpoint"


class CaptureError(OverlapError):
    """The program cannot be brought to the ATen level; it runs un-sliced instead."""


@dataclasses.dataclass(frozen=True)
class Captured:
    """A forward graph at the pre-dispatch ATen level.

    gm: placeholders in the order of Dynamo's, sources carried over.
    policies: per checkpointed region, the user's selective policy, or None for a full one.
    """

    gm: fx.GraphModule
    policies: Mapping[int, Callable[..., Any] | None]


def to_aten(dynamo_gm: fx.GraphModule) -> Captured:
    """Trace Dynamo's graph to ATen under Dynamo's own fake mode.

    Raises CaptureError with the reason where a node has no faithful form at that level: an
    autograd.Function (its backward would be lost) or anything that does not trace.
    """
    inputs = graph.placeholders(dynamo_gm.graph)
    fakes = [graph.fake_value(node) for node in inputs]
    mode = next((f.fake_mode for f in fakes if isinstance(f, torch.Tensor)), None)
    if mode is None:
        raise CaptureError("the graph has no tensor input")
    interpreter = _Inliner(dynamo_gm)
    # Dynamo's tracing context holds a second fake mode; values of two modes do not mix.
    with torch._guards.tracing(None), mode, traceback.preserve_node_meta():
        try:
            gm = make_fx(interpreter.run, pre_dispatch=True)(*fakes)
        except CaptureError:
            raise
        except Exception as error:
            first_line = str(error).splitlines()[0] if str(error) else ""
            raise CaptureError(
                f"the graph does not trace to ATen operators: {type(error).__name__}: {first_line}"
            ) from error
    for source, target in zip(inputs, graph.placeholders(gm.graph), strict=True):
        graph.copy_source(source, target)
    graph.set_phase(gm, graph.Phase.FORWARD)
    return Captured(gm, interpreter.policies)


class _Inliner(fx.Interpreter):
    """Runs Dynamo's graph with checkpoint bodies inlined, their nodes marked with the region."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.policies: dict[int, Callable[..., Any] | None] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        match getattr(target, "__name__", ""):
            case "tag_activation_checkpoint":
                return self._inline_checkpoint(*args)
            case "autograd_function_apply":
                raise CaptureError(
                    "an autograd.Function has a backward of its own, which is not proven to keep "
                    "rows apart; leave it out of the compiled module, or write it with operators"
                )
            case _:
                return super().call_function(target, args, kwargs)

    def _inline_checkpoint(self, body: Any, *args: Any) -> Any:
        region = len(self.policies)
        self.policies[region] = _policy_of(body)
        nested = _Inliner(body)
        nested.policies = self.policies
        with traceback.annotate({CHECKPOINT_KEY: region}):
            return nested.run(*args)


def _policy_of(body: fx.GraphModule) -> Callable[..., Any] | None:
    """The selective-checkpointing policy that the user gave, or None for full recompute."""
    context_fn = body.meta.get("_checkpoint_context_fn")
    if context_fn is None:
        return None
    forward_context, _ = context_fn()
    return forward_context.policy_fn


def checkpoint_region(node: fx.Node) -> int | None:
    """The checkpointed region that a node came from, also after autograd; None outside any."""
    return (node.meta.get("custom") or {}).get(CHECKPOINT_KEY)
