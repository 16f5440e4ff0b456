"""rowwise_loss: a cross-entropy over all rows becomes one per row and a sum of them.

    before   loss = cross_entropy(y, labels, reduction=mean)
    after    rows = cross_entropy(y, labels, reduction=none)
             loss = sum(rows) / sum(labels != ignored)

Why it is correct: it is what the reduction stands for. The rows of a slice, and their gradients,
then need no other slice's, so a slice begins its backward while others are in their forward: of use
where both are one graph. Only in fp32 or better, for class indices without weights of classes.

Cost: the loss is summed in another order; a few small kernels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from overlap import graph
from overlap import placement as pl
from overlap.graph import Phase
from overlap.pipeline import Context, Effect

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # values of `reduction`


@dataclasses.dataclass(frozen=True)
class RowwiseLoss:
    """Off, it leaves the graph alone."""

    is_on: bool = False
    name: str = "rowwise_loss"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        if not self.is_on:
            return
        for node in list(gm.graph.nodes):
            if graph.is_call(node, aten.cross_entropy_loss):
                arguments = pl.schema_arguments(node)
                if _is_plain(arguments):
                    _take_apart(node, arguments)


def _is_plain(arguments: dict[str, Any]) -> bool:
    """Whether it is a reduced cross-entropy of class indices that all count alike."""
    logits, target = (graph.fake_value(arguments[name]) for name in ("self", "target"))
    return (
        arguments["reduction"] != _NONE
        and arguments["weight"] is None
        and logits.dtype in (torch.float32, torch.float64)
        and not target.is_floating_point()
        and logits.dim() > 1
    )


def _take_apart(node: fx.Node, arguments: dict[str, Any]) -> None:
    target, ignored = arguments["target"], arguments["ignore_index"]
    of_rows = arguments | {"reduction": _NONE}  # in the order of the schema
    with node.graph.inserting_before(node):
        rows = graph.call_like(node, node.target, tuple(of_rows.values()))
        loss = graph.call_like(node, aten.sum.default, (rows,))
        if arguments["reduction"] == _MEAN:
            is_counted = graph.call_like(node, aten.ne.Scalar, (target, ignored))
            count = graph.call_like(node, aten.sum.default, (is_counted,))
            loss = graph.call_like(node, aten.div.Tensor, (loss, count))
    node.replace_all_uses_with(loss)
