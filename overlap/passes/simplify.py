"""simplify: less work for the same bits.

    detach(x), x ** 1, x * 1, x / 1, t(t(x))    becomes   x
    expand(x, s), x of shape s                  becomes   x
    view(view(x, r), s)                         becomes   view(x, s), or x where it has shape s
    expand(x, s) / c                            becomes   expand(x / c, s)
    expand(x, s) * (y * 2)                      becomes   expand(x * 2, s) * y

Why it is correct: after autograd a detach changes nothing, and a value times one is itself. An
operator on each element alone gives the same bits before an expand and after it. A power of two
changes the exponent of a product and no other bit, short of overflow, whichever factor it goes to.

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
        for node in list(gm.graph.nodes):
            if graph.is_call(node, *_VIEW):
                _skip_inner_views(node)
            elif _is_scaling(node):
                _scale_before_expand(node)
            elif node.target is aten.mul.Tensor:
                _double_the_smaller(node)
            source = _same_as(node)
            if source is not None:
                _drop(node, source)


def _same_as(node: fx.Node) -> fx.Node | None:
    """The value that `node` is, where it changes nothing."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if graph.is_call(node, *_SAME):
        return source
    if graph.is_call(node, aten.t) and graph.is_call(source, aten.t):
        return graph.args_of(source)[0]
    if graph.is_call(node, *_VIEW, aten.expand):
        return source if _has_type_of(node, source) else None
    is_times_one = _is_scaling(node) or node.target is aten.pow.Tensor_Scalar
    if is_times_one and graph.args_of(node)[1] == 1 and _is_read_only(node, source):
        return source if _has_type_of(node, source) else None
    return None


def _has_type_of(node: fx.Node, other: fx.Node) -> bool:
    one, two = graph.fake_value(node), graph.fake_value(other)
    return one.dtype == two.dtype and graph.is_same_shape(one.shape, two.shape)


def _is_scaling(node: fx.Node) -> bool:
    """Whether `node` multiplies or divides a tensor by a number."""
    return (
        graph.is_call(node, *_SCALING)
        and len(node.args) == 2
        and not node.kwargs
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[1], int | float)
    )


def _is_read_only(*nodes: fx.Node) -> bool:
    """Whether nobody writes into the nodes' memory: then two of them may share it."""
    return not any(
        isinstance(user.target, torch._ops.OpOverload) and user.target._schema.is_mutable
        for node in nodes
        for user in node.users
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
    """expand(x, s) / c: the number is applied to the few elements that there are."""
    expanded, number = graph.args_of(node)
    if not graph.is_call(expanded, aten.expand):
        return
    small, sizes, *rest = graph.args_of(expanded)
    with node.graph.inserting_before(node):
        scaled = _call(node, node.target, small, number)
        result = _call(node, aten.expand.default, scaled, sizes, *rest)
    node.replace_all_uses_with(result)


def _double_the_smaller(node: fx.Node) -> None:
    """expand(x, s) * (y * c), c a power of two."""
    for expanded, scaled in (graph.args_of(node), reversed(graph.args_of(node))):
        if not (graph.is_call(expanded, aten.expand) and _is_scaled(scaled)):
            continue
        small, sizes, *rest = graph.args_of(expanded)
        large, number = graph.args_of(scaled)
        with node.graph.inserting_before(node):
            doubled = _call(node, scaled.target, small, number)
            wide = _call(node, aten.expand.default, doubled, sizes, *rest)
        node.args = (wide, large)
        return


def _is_scaled(node: Any) -> bool:
    """Whether `node` is a product of floats with a power of two that nobody else reads."""
    if not isinstance(node, fx.Node) or not _is_scaling(node) or len(node.users) != 1:
        return False
    source, number = graph.args_of(node)
    is_float = graph.fake_value(source).dtype.is_floating_point and _has_type_of(node, source)
    return is_float and graph.is_call(node, aten.mul) and abs(math.frexp(number)[0]) == 0.5


def _call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
    node = like.graph.call_function(target, args)
    graph.copy_facts(like, node)
    graph.infer_fake_value(node)
    return node
