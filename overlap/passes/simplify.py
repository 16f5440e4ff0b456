"""simplify: less work for the same bits.

    detach(x), x ** 1, x * 1, x / 1, t(t(x))    becomes   x
    expand(x, s), x of shape s                  becomes   x
    view(view(x, r), s)                         becomes   view(x, s), or x where it has shape s
    (expand(x, s) / c) * y                      becomes   expand(x / c, s) * y
    expand(x, s) * (y * 2)                      becomes   expand(x * 2, s) * y

Why it is correct: after autograd a detach changes nothing, and a real value times one is itself; it
is a copy, though, so what is an input's memory, or is returned, stays as it is. An operator on each
element alone gives the same bits before an expand and after it. A power of two changes the exponent
of a product of one dtype and no other bit, short of overflow and underflow, whichever factor it
goes to. Every value keeps its strides: what is a view of it stays possible.

Cost: none. Autograd writes the backward of a mean, and so of a norm, with a full-size division and
a full-size doubling; here both are of the size of the mean.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from overlap import graph
from overlap.graph import Phase
from overlap.pipeline import Context, Effect

aten = torch.ops.aten
_SAME = (aten.detach, aten.alias)
_VIEW = (aten.view.default, aten._unsafe_view.default)
_SCALING = (aten.mul, aten.div)


@dataclasses.dataclass(frozen=True)
class Simplify:
    name: str = "simplify"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.NORMALIZED
    ensures: Phase = Phase.NORMALIZED

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        inputs = {s for node in graph.placeholders(gm.graph) for s in graph.storages_of(node)}
        for node in list(gm.graph.nodes):
            if graph.is_call(node, *_VIEW):
                _skip_inner_views(node)
            elif node.target is aten.mul.Tensor and not _is_scaling(node):
                _scale_before_expand(node)
                _double_the_smaller(node)
            source = node.args[0] if _is_copy(node, inputs) else _same_as(node)
            if isinstance(source, fx.Node):
                _drop(node, source)


def _is_copy(node: fx.Node, inputs: set[int]) -> bool:
    """Whether `node` is its operand times one, and nobody could tell it from the operand."""
    is_power = node.target is aten.pow.Tensor_Scalar
    if not (is_power or _is_scaling(node)) or graph.args_of(node)[1] != 1:
        return False
    source: fx.Node = graph.args_of(node)[0]
    value = graph.fake_value(source)
    return (
        graph.has_type_of(node, source)
        and _has_strides_of(node, value)
        and not value.dtype.is_complex
        and inputs.isdisjoint(graph.storages_of(source))
        and graph.output_node(node.graph) not in node.users
    )


def _same_as(node: fx.Node) -> fx.Node | None:
    """The value that `node` names another time."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if graph.is_call(node, *_SAME):
        return source
    if graph.is_call(node, aten.t) and graph.is_call(source, aten.t):
        return graph.args_of(source)[0]
    if graph.is_call(node, *_VIEW, aten.expand):
        return source if graph.has_type_of(node, source) else None
    return None


def _has_strides_of(node: fx.Node, other: torch.Tensor) -> bool:
    return graph.is_same_shape(graph.fake_value(node).stride(), other.stride())


def _is_scaling(node: Any) -> bool:
    """Whether `node` multiplies or divides a tensor by a number."""
    return (
        isinstance(node, fx.Node)
        and graph.is_call(node, *_SCALING)
        and len(node.args) == 2
        and not node.kwargs
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[1], int | float)
    )


def _drop(node: fx.Node, source: fx.Node) -> None:
    """Two outputs stay two tensors, and an input's is another than the input."""
    output = graph.output_node(node.graph)
    is_taken = source.op == "placeholder" or output in source.users
    for user in list(node.users):
        if user is not output or not is_taken:
            user.replace_input_with(node, source)


def _skip_inner_views(node: fx.Node) -> None:
    source, sizes = graph.args_of(node)
    while graph.is_call(source, *_VIEW):
        source = graph.args_of(source)[0]
    node.args = (source, sizes)


def _scale_before_expand(node: fx.Node) -> None:
    """(expand(x, s) / c) * y: the number is applied to the few elements that there are."""
    for i, factor in enumerate(graph.args_of(node)):
        if not _is_scaling(factor) or len(factor.users) != 1:
            continue
        expanded, number = graph.args_of(factor)
        if _is_expand(expanded):
            wide = _scaled_then_expanded(node, expanded, factor.target, number)
            _try_arguments(node, (wide, node.args[1]) if i == 0 else (node.args[0], wide))
            return


def _double_the_smaller(node: fx.Node) -> None:
    """expand(x, s) * (y * c), c a power of two."""
    for expanded, scaled in (graph.args_of(node), reversed(graph.args_of(node))):
        if _is_expand(expanded) and _is_scaled(scaled) and _has_dtype_of(expanded, scaled):
            large, number = graph.args_of(scaled)
            wide = _scaled_then_expanded(node, expanded, scaled.target, number)
            is_left = node.args[0] is expanded
            _try_arguments(node, (wide, large) if is_left else (large, wide))
            return


def _scaled_then_expanded(like: fx.Node, expanded: fx.Node, scale: Any, number: float) -> fx.Node:
    small, *how = graph.args_of(expanded)
    with like.graph.inserting_before(like):
        scaled = graph.call_like(like, scale, (small, number))
        return graph.call_like(like, aten.expand.default, (scaled, *how))


def _try_arguments(node: fx.Node, args: tuple[Any, ...]) -> None:
    """Give the product other arguments, unless it would then come out with other strides."""
    before, recorded = node.args, graph.fake_value(node)
    node.args = args
    graph.infer_fake_value(node)
    found = graph.fake_value(node)
    graph.set_fake_value(node, recorded)
    if found.dtype != recorded.dtype or not _has_strides_of(node, found):
        node.args = before


def _has_dtype_of(one: fx.Node, other: fx.Node) -> bool:
    return graph.fake_value(one).dtype == graph.fake_value(other).dtype


def _is_expand(node: Any) -> bool:
    return isinstance(node, fx.Node) and graph.is_call(node, aten.expand)


def _is_scaled(node: Any) -> bool:
    """Whether `node` is a product of floats with a power of two that nobody else reads."""
    if not _is_scaling(node) or len(node.users) != 1:
        return False
    source, number = graph.args_of(node)
    is_float = graph.fake_value(source).dtype.is_floating_point and graph.has_type_of(node, source)
    return is_float and graph.is_call(node, aten.mul) and abs(math.frexp(number)[0]) == 0.5
