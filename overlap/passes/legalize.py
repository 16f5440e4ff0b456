"""legalize: what the executor needs to keep the schedule's order and its buffers apart.

    before   s0, s1 = split(x);  a = all_reduce_(s0);  b = all_reduce_(s1)
    after    c0 = clone(s0);  c1 = clone(s1);  a = all_reduce_(c0);  b = all_reduce_(c1)

    before   w0 = mm(g0, x0);  dw = addmm(w0, g1, x1)
    after    w0 = mm(g0, x0);  dw = addmm_(w0, g1, x1)

    before   z = new_zeros(x);  y = index_add(z, 0, i, x)
    after    z = new_zeros(x);  y = index_add_(z, 0, i, x)

Why it is correct: torch finds the work to wait for by the storage of the result, and a wait
completes every work on that storage. A collective that writes in place into a storage that another
one shares gets a copy of its own. A fresh value whose only use is to be added to is nobody else's,
so the sum may take its storage. The order itself needs nothing here: eager kernels run in graph
order.

Cost: one copy for each operand that shares its storage; a copy less for each sum.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from overlap import collectives, graph
from overlap.graph import Phase
from overlap.pipeline import Context, Effect

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Legalize:
    name: str = "legalize"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.SCHEDULED
    ensures: Phase = Phase.LEGAL

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        by_storage: dict[int, list[fx.Node]] = {}
        for node in gm.graph.nodes:
            if collectives.is_start(node) and _writes_operand(node):
                key = graph.storage_of(collectives.operand_of(node))
                by_storage.setdefault(key, []).append(node)
        for starts in by_storage.values():
            if len(starts) > 1:
                for start in starts:
                    _give_own_storage(start)
        for node in gm.graph.nodes:
            if _may_add_in_place(node):
                node.target = _IN_PLACE[node.target]


def _writes_operand(start: fx.Node) -> bool:
    return isinstance(start.target, torch._ops.OpOverload) and start.target._schema.is_mutable


def _give_own_storage(start: fx.Node) -> None:
    operand = collectives.rows_of(start)
    with start.graph.inserting_before(start):
        copy = graph.call_like(start, aten.clone.default, (operand,))
    start.replace_input_with(operand, copy)


_IN_PLACE: dict[object, torch._ops.OpOverload] = {
    aten.addmm.default: aten.addmm_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_FRESH = (aten.mm, aten.addmm, aten.addmm_, aten.new_zeros, aten.zeros, aten.zeros_like)


def _may_add_in_place(node: fx.Node) -> bool:
    """Whether `node` adds to a new value of its own size that it alone reads."""
    if node.target not in _IN_PLACE or node.kwargs:
        return False
    added = node.args[0]
    assert isinstance(added, fx.Node)
    return (
        graph.is_call(added, *_FRESH)
        and len(added.users) == 1
        and list(node.args).count(added) == 1
        and graph.has_type_of(node, added)
    )
