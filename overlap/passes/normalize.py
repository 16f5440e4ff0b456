"""normalize: one form for what can be written in several ways.

    wait(wait(s))                                    becomes   wait(s)
    cat([p0, p1]) of all pieces p0, p1 = split(x)    becomes   x
    split(cat([a, b])) cut where a and b meet        becomes   a, b
    select_backward(g0, 0) + select_backward(g1, 1)  becomes   stack([g0, g1])
    t(w) and t(w), size(x) and size(x)               becomes   one of them

Why it is correct: a wait returns the tensor that it waited for; the pieces of a split are its
operand; each `select_backward` of a sum fills another row of zeros; a view or a size depends on its
operands alone.

Cost: none; copies and full-size zero fills go.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import torch
from torch import fx

from overlap import collectives, graph
from overlap.graph import Phase
from overlap.pipeline import Context, Effect

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Normalize:
    name: str = "normalize"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.JOINT
    ensures: Phase = Phase.NORMALIZED

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        for node in list(gm.graph.nodes):
            if collectives.is_wait(node):
                _drop_second_wait(node)
            elif graph.is_call(node, aten.cat):
                _drop_cat_of_pieces(node)
            elif graph.is_call(node, aten.split_with_sizes):
                _drop_split_of_cat(node)
        for node in list(gm.graph.nodes):
            if graph.is_call(node, aten.add):
                _stack_selected(node)
        _share_views(gm.graph)


_VIEWS = (
    aten.t, aten.view, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.expand,
    aten.sym_size, operator.add, operator.sub, operator.mul, operator.floordiv, operator.ge,
)  # fmt: skip


def _share_views(graph_: fx.Graph) -> None:
    """Views and sizes of one value that are alike become one node, which belongs to no slice where
    two slices use it."""
    seen: dict[object, fx.Node] = {}
    for node in list(graph_.nodes):
        if not graph.is_call(node, *_VIEWS) or any(user.op == "output" for user in node.users):
            continue
        first = seen.setdefault((node.target, _hashable(node.args), _hashable(node.kwargs)), node)
        if first is node:
            continue
        if graph.tag_of(first).slice != graph.tag_of(node).slice:
            graph.set_tag(first, graph.Tag())
        node.replace_all_uses_with(first)


def _hashable(value: object) -> object:
    match value:
        case list() | tuple():
            return tuple(map(_hashable, value))
        case dict():
            return tuple(sorted((key, _hashable(item)) for key, item in value.items()))
        case bool() | int() | float():
            return type(value).__name__, value
        case _:
            return value


def _drop_second_wait(node: fx.Node) -> None:
    source = collectives.awaited(node)
    if collectives.is_wait(source):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)  # a wait has an effect: nobody else removes it


def pieces_of(pieces: Sequence[fx.Node], dim: int) -> fx.Node | None:
    """The value whose split along `dim` gives exactly `pieces`, in order; None if there is none."""
    if pieces[0].target is not operator.getitem:
        return None
    split: fx.Node = graph.args_of(pieces[0])[0]
    if not graph.is_call(split, aten.split_with_sizes) or _dim_of(split) != dim:
        return None
    source, sizes, *_ = graph.args_of(split)
    is_exact = len(sizes) == len(pieces) and all(
        piece.target is operator.getitem and piece.args == (split, i)
        for i, piece in enumerate(pieces)
    )
    return source if is_exact else None


def _dim_of(node: fx.Node) -> int:
    """The dim of a split or cat, counted from the front."""
    args = graph.args_of(node)
    at = 2 if graph.is_call(node, aten.split_with_sizes) else 1
    dim = args[at] if len(args) > at else node.kwargs.get("dim", 0)
    source = args[0][0] if isinstance(args[0], list | tuple) else args[0]
    return dim % graph.fake_value(source).dim()


def _drop_cat_of_pieces(node: fx.Node) -> None:
    pieces: list[fx.Node] = list(graph.args_of(node)[0])
    whole = pieces_of(pieces, _dim_of(node)) if pieces else None
    if whole is not None:
        node.replace_all_uses_with(whole)


def _drop_split_of_cat(node: fx.Node) -> None:
    source, sizes, *_ = graph.args_of(node)
    dim = _dim_of(node)
    if not graph.is_call(source, aten.cat) or _dim_of(source) != dim:
        return
    parts: list[fx.Node] = list(graph.args_of(source)[0])
    is_cut_at_joins = len(parts) == len(sizes) and all(
        graph.is_same_size(graph.fake_value(part).shape[dim], _size(size))
        for part, size in zip(parts, sizes, strict=True)
    )
    if is_cut_at_joins:
        for user in list(node.users):
            user.replace_all_uses_with(parts[graph.args_of(user)[1]])


def _size(argument: object) -> int | torch.SymInt:
    return graph.fake_value(argument) if isinstance(argument, fx.Node) else argument  # pyright: ignore


def sum_leaves(root: fx.Node) -> list[fx.Node]:
    """The terms of a tree of plain additions of equal shape and dtype, left to right."""
    if not _is_plain_add(root):
        return [root]
    leaves: list[fx.Node] = []
    for operand in root.args[:2]:
        assert isinstance(operand, fx.Node)
        is_inner = len(operand.users) == 1 and _is_plain_add(operand)
        leaves.extend(sum_leaves(operand) if is_inner else [operand])
    return leaves


def _is_plain_add(node: fx.Node) -> bool:
    if not graph.is_call(node, aten.add) or node.kwargs or len(node.args) != 2:
        return False
    value = graph.fake_value(node)
    return all(
        isinstance(arg, fx.Node)
        and isinstance(graph.fake_value(arg), torch.Tensor)
        and graph.fake_value(arg).dtype == value.dtype
        and graph.fake_value(arg).shape == value.shape
        for arg in node.args
    )


def is_sum_root(node: fx.Node) -> bool:
    """Whether `node` adds and is not itself a term of a larger sum."""
    users = list(node.users)
    is_inner = len(users) == 1 and _is_plain_add(users[0])
    return _is_plain_add(node) and not is_inner


def _stack_selected(root: fx.Node) -> None:
    """A sum of gradients of `w[0]`, `w[1]`, ..., each zero elsewhere, is their stack."""
    if not is_sum_root(root):
        return
    leaves = sum_leaves(root)
    if not all(graph.is_call(leaf, aten.select_backward) for leaf in leaves):
        return
    by_index: dict[int, fx.Node] = {}
    for leaf in leaves:
        gradient, sizes, dim, index = graph.args_of(leaf)
        if dim != 0 or not isinstance(index, int) or index in by_index:
            return
        by_index[index % sizes[0]] = gradient
    if sorted(by_index) != list(range(graph.fake_value(root).shape[0])):
        return
    with root.graph.inserting_before(root):
        stacked = root.graph.call_function(
            aten.stack.default, ([by_index[i] for i in sorted(by_index)],)
        )
    graph.copy_facts(root, stacked)
    graph.set_fake_value(stacked, graph.fake_value(root))
    root.replace_all_uses_with(stacked)
