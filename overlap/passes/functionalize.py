"""functionalize: in-place operators on the forward's own values become out-of-place ones.

    before   zeros = aten.zeros([8, 4]);  aten.index_add_(zeros, 0, i, x);  use(zeros)
    after    zeros = aten.zeros([8, 4]);  new = aten.index_add(zeros, 0, i, x);  use(new)

Why it is correct: the written value, and nothing that shares its storage, is read again except
through the write, so readers of the new value see what readers of the old one saw. A write through
a view whose base is read later, or into an input, is left as it is; slicing then joins or refuses.

Cost: none; the copy that the out-of-place form makes replaces a value that dies.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from overlap import graph
from overlap.graph import Phase
from overlap.pipeline import Context, Effect


@dataclasses.dataclass(frozen=True)
class Functionalize:
    name: str = "functionalize"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        aliases = _nodes_by_storage(gm.graph)
        for node in list(gm.graph.nodes):
            if functional := _functional_form(node):
                _rewrite(node, functional, aliases)


def _nodes_by_storage(graph_: fx.Graph) -> dict[int, list[fx.Node]]:
    """Nodes in program order by the storage of their fake tensors."""
    result: dict[int, list[fx.Node]] = {}
    for node in graph_.nodes:
        for tensor in graph.tensors_of(graph.fake_value(node)):
            result.setdefault(tensor.untyped_storage()._cdata, []).append(node)
    return result


def _functional_form(node: fx.Node) -> torch._ops.OpOverload | None:
    """The out-of-place operator behind `op_`, where it takes the same arguments."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    packet = str(target.overloadpacket).removeprefix("aten.")
    if not packet.endswith("_") or packet.endswith("__"):
        return None
    namesake = getattr(torch.ops.aten, packet.removesuffix("_"), None)
    overload = getattr(namesake, target._overloadname, None) if namesake else None
    if overload is None:
        return None
    names = [argument.name for argument in target._schema.arguments]
    return overload if names == [a.name for a in overload._schema.arguments] else None


def _rewrite(
    node: fx.Node, functional: torch._ops.OpOverload, aliases: dict[int, list[fx.Node]]
) -> None:
    written = node.args[0]
    if not isinstance(written, fx.Node):
        return
    value = graph.fake_value(written)
    sharing = aliases.get(value.untyped_storage()._cdata, []) if value is not None else []
    if not sharing or any(other.op in ("placeholder", "get_attr") for other in sharing):
        return
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    later = [
        other
        for other in sharing
        if other not in (node, written) and any(order[u] > order[node] for u in other.users)
    ]
    # Views made after the write, from the written value, are readers of the new value.
    if any(order[other] < order[node] for other in later):
        return
    with node.graph.inserting_after(node):
        new = node.graph.call_function(functional, node.args, node.kwargs)
    graph.copy_facts(node, new)
    graph.set_fake_value(new, graph.fake_value(node))
    node.replace_all_uses_with(new)
    for user in list(written.users):
        if user is not new and order.get(user, 0) > order[node]:
            user.replace_input_with(written, new)
    node.graph.erase_node(node)
