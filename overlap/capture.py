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
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
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

    Raises CaptureError with the reason where a node has no faithful form at that level: what has a
    backward of its own (it would be lost) and anything that does not trace.
    """
    inputs = graph.placeholders(dynamo_gm.graph)
    fakes = [graph.fake_value(node) for node in inputs]
    mode = next((f.fake_mode for f in fakes if isinstance(f, FakeTensor)), None)
    if mode is None:
        raise CaptureError("the graph has no tensor input")
    interpreter = _Inliner(dynamo_gm)
    # Dynamo's tracing context holds a second fake mode; values of two modes do not mix.
    with tracing(None), mode, traceback.preserve_node_meta():
        try:
            gm = make_fx(interpreter.run, pre_dispatch=True)(*fakes)
        except CaptureError:
            raise
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise CaptureError(
                f"the graph does not trace to ATen operators: {type(error).__name__}: {first_line}"
            ) from error
    _check_constants(gm)
    for source, target in zip(inputs, graph.placeholders(gm.graph), strict=True):
        graph.copy_source(source, target)
    if _uses_autocast(gm):
        # The trace stands above autocast, so it recorded the dtypes that there are without it.
        graph.propagate_fake_values(gm)
    graph.set_phase(gm, graph.Phase.FORWARD)
    return Captured(gm, interpreter.policies)


def _uses_autocast(gm: fx.GraphModule) -> bool:
    devices = ("cpu", "cuda")
    is_inside = any(node.target is enter_autocast for node in gm.graph.nodes)
    return is_inside or any(torch.is_autocast_enabled(device) for device in devices)


def _check_constants(gm: fx.GraphModule) -> None:
    """A value that tracing lost sight of became a constant: the graph would repeat it for ever."""
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, str(node.target), None)
        if isinstance(value, torch.Tensor) and (
            isinstance(value, FakeTensor) or is_functorch_wrapped_tensor(value)
        ):
            raise CaptureError(f"the trace lost sight of a value{_at(node)}")


_OWN_BACKWARD = {
    "autograd_function_apply": "an autograd.Function",
    "register_hook": "a tensor hook",
}
_FAITHFUL = ("cond",)
"""Higher-order operators that make_fx keeps, with their gradient."""


_CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool")


class _Inliner(fx.Interpreter):
    """Runs Dynamo's graph with checkpoint bodies inlined, their nodes marked with the region."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.policies: dict[int, Callable[..., Any] | None] = {}
        self.node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(target, "__name__", "")
        if name == "tag_activation_checkpoint":
            return self._inline_checkpoint(*args)
        if name in _OWN_BACKWARD:
            raise CaptureError(
                f"{_OWN_BACKWARD[name]}{_at(self.node)} has a backward of its own, which is not "
                "proven to keep rows apart; leave it out of the compiled module, or write it with "
                "operators"
            )
        is_higher_order = isinstance(target, torch._ops.HigherOrderOperator)
        module = getattr(target, "__module__", "") or ""
        if (is_higher_order and name not in _FAITHFUL) or module.startswith("torch._functorch"):
            raise CaptureError(f"{name}{_at(self.node)} has no form as ATen operators")
        if isinstance(target, torch._ops.OpOverload):
            args = _kept_apart(target.overloadpacket.__name__, args)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_method(target, _kept_apart(target, args), kwargs)

    def _inline_checkpoint(self, body: Any, *args: Any) -> Any:
        region = len(self.policies)
        self.policies[region] = _policy_of(body)
        for node in body.graph.nodes:
            graph.annotate(node, CHECKPOINT_KEY, region)
        nested = _Inliner(body)
        nested.policies = self.policies
        return nested.run(*args)


def _kept_apart(name: str, args: Any) -> Any:
    """A cast that changes nothing returns its operand, and the trace would take every later use of
    that for the cast. Under autocast it does change something when it runs."""
    if name in _CASTS and args and isinstance(args[0], torch.Tensor):
        return (torch.ops.aten.alias.default(args[0]), *args[1:])
    return args


def _at(node: fx.Node | None) -> str:
    line = graph.source_line(node) if node is not None else ""
    return f" ({line})" if line else ""


def _policy_of(body: fx.GraphModule) -> Callable[..., Any] | None:
    """The selective-checkpointing policy that the user gave, or None for full recompute."""
    context_fn = body.meta.get("_checkpoint_context_fn")
    if context_fn is None:
        return None
    forward_context, _ = context_fn()
    return forward_context.policy_fn


def checkpoint_region(node: fx.Node) -> int | None:
    """The checkpointed region that a node came from, also after autograd; None outside any."""
    return graph.annotation(node, CHECKPOINT_KEY)
