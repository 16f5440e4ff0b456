"""functionalize: in-place operators on the forward's own values become out-of-place ones.

    before   zeros = aten.zeros([8, 4]);  aten.index_add_(zeros, 0, i, x);  use(zeros)
    after    zeros = aten.zeros([8, 4]);  new = aten.index_add(zeros, 0, i, x);  use(new)

Why it is correct: the written value, and nothing that shares its storage, is read again except
through the write, so readers of the new value see what readers of the old one saw. A write through
a view whose base is read later, or into an input, is left as it is; slicing computes it once.

Cost: none; the copy that the out-of-place form makes replaces a value that dies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from overlap import graph
from overlap.graph import Phase
from overlap.pipeline import Context, Effect

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Functionalize:
    name: str = "functionalize"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        functionalize(gm.graph)


def functionalize(graph_: fx.Graph) -> None:
    """Replace every in-place call that has an equal out-of-place form, in place."""
    order = {node: i for i, node in enumerate(graph_.nodes)}
    sharing = _nodes_by_storage(graph_)
    for node in list(graph_.nodes):
        functional = _functional_form(node)
        if functional is None or not isinstance(node.args[0], fx.Node):
            continue
        storage = _storage(node.args[0])
        group = sharing.get(storage, [])
        if not _may_be_replaced(node, group, order):
            continue
        new = _replace(node, functional, order)
        # From here on the storage is that of the new value and of the views made of it.
        sharing[storage] = [new, *(n for n in group if order[n] > order[node])]


def _nodes_by_storage(graph_: fx.Graph) -> dict[int | None, list[fx.Node]]:
    """Nodes in program order by the storage of their fake tensors."""
    result: dict[int | None, list[fx.Node]] = {}
    for node in graph_.nodes:
        for storage in graph.storages_of(node):
            result.setdefault(storage, []).append(node)
    return result


def _storage(node: fx.Node) -> int | None:
    value = graph.fake_value(node)
    return graph.storage_of(value) if isinstance(value, torch.Tensor) else None


def _functional_form(node: fx.Node) -> torch._ops.OpOverload | None:
    """The out-of-place operator behind `op_`, where it takes the same arguments and has a
    derivative (forms that torch generates have none)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    if target is aten.copy_.default:
        return aten.expand_as.default
    packet = str(target.overloadpacket).removeprefix("aten.")
    if not packet.endswith("_") or packet.endswith("__"):
        return None
    namesake = getattr(aten, packet.removesuffix("_"), None)
    overload = getattr(namesake, target._overloadname, None) if namesake else None
    if overload is None or torch.Tag.generated in overload.tags:
        return None
    names = [argument.name for argument in target._schema.arguments]
    return overload if names == [a.name for a in overload._schema.arguments] else None


def _may_be_replaced(node: fx.Node, sharing: Sequence[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether the write is seen only through the written value and what is made of it later."""
    if not sharing or any(other.op in ("placeholder", "get_attr") for other in sharing):
        return False
    written = node.args[0]
    return not any(
        order[other] < order[node] and any(order[user] > order[node] for user in other.users)
        for other in sharing
        if other not in (node, written)
    )


def _replace(
    node: fx.Node, functional: torch._ops.OpOverload, order: dict[fx.Node, int]
) -> fx.Node:
    """The out-of-place call, read wherever the written value is read from here on."""
    written: Any = node.args[0]
    is_copy = node.target is aten.copy_.default
    args = (node.args[1], written) if is_copy else node.args
    new = _insert(node, node, functional, args, {} if is_copy else node.kwargs)
    graph.infer_fake_value(new)
    dtype = graph.fake_value(written).dtype
    if is_copy or graph.fake_value(new).dtype != dtype:  # a write keeps the dtype of its target
        new = _insert(new, node, aten._to_copy.default, (new,), {"dtype": dtype})
    graph.set_fake_value(new, graph.fake_value(node))
    order[new] = order[node]
    node.replace_all_uses_with(new)
    for user in list(written.users):
        if order.get(user, -1) > order[node]:
            user.replace_input_with(written, new)
    node.graph.erase_node(node)
    return new


def _insert(
    after: fx.Node, origin: fx.Node, target: torch._ops.OpOverload, args: Any, kwargs: Any
) -> fx.Node:
    with origin.graph.inserting_after(after):
        new = origin.graph.call_function(target, args, kwargs)
    graph.copy_facts(origin, new)
    return new
