"""All ranks of a job in one process: each node for every rank before the next node.

Ranks run one graph, each on values of its own. A collective is plain arithmetic on the values of all
ranks, so autograd goes through it, and the gradient of the summed losses is what ranks would get.
What would hang a job or mix its data is an error: splits that do not agree.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from overlap import collectives
from overlap.collectives import Kind

Values = dict[fx.Node, Any]


class SplitsDisagree(AssertionError):
    """A rank sends another number of rows than its peer expects."""


def play(gm: fx.GraphModule, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The outputs of every rank, given the inputs of every rank."""
    ranks: list[Values] = [{} for _ in inputs]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for values, given in zip(ranks, inputs, strict=True):
        values.update(zip(placeholders, given, strict=True))
    for node in gm.graph.nodes:
        match node.op:
            case "placeholder":
                pass
            case "get_attr":
                for values in ranks:
                    values[node] = operator.attrgetter(node.target)(gm)
            case "output":
                return [list(fx.map_arg(node.args[0], values.__getitem__)) for values in ranks]
            case _ if collectives.is_start(node):
                for values, result in zip(ranks, _exchange(node, ranks), strict=True):
                    values[node] = result
            case _ if collectives.is_wait(node):
                for values in ranks:
                    values[node] = values[collectives.awaited(node)]
            case _:
                for values in ranks:
                    _call(node, values)
    raise AssertionError("a graph without an output")


def _call(node: fx.Node, values: Values) -> None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    target: Any = node.target
    values[node] = target(*args, **kwargs)


def _exchange(node: fx.Node, ranks: Sequence[Values]) -> list[Tensor]:
    rows = [values[collectives.rows_of(node)] for values in ranks]
    match collectives.kind_of(node):
        case Kind.ALL_TO_ALL:
            return _all_to_all(node, ranks, rows)
        case Kind.ALL_REDUCE:
            total = torch.stack(rows).sum(0)
            return [total.clone() for _ in ranks]
        case Kind.ALL_GATHER:
            return [torch.cat(rows) for _ in ranks]
        case Kind.REDUCE_SCATTER:
            return [part.clone() for part in torch.stack(rows).sum(0).chunk(len(ranks))]
        case kind:
            raise NotImplementedError(f"{kind} in lockstep")


def _all_to_all(node: fx.Node, ranks: Sequence[Values], rows: Sequence[Tensor]) -> list[Tensor]:
    outs, ins = collectives.splits_of(node)
    received = [_sizes(outs, values, x) for values, x in zip(ranks, rows, strict=True)]
    sent = [_sizes(ins, values, x) for values, x in zip(ranks, rows, strict=True)]
    parts = [x.split(sizes) for x, sizes in zip(rows, sent, strict=True)]
    for to, sizes in enumerate(received):
        if sizes != [own[to] for own in sent]:
            raise SplitsDisagree(f"{node}: rank {to} expects {sizes} of rows sent {sent}")
    return [torch.cat([own[to] for own in parts]) for to in range(len(ranks))]


def _sizes(splits: Sequence[Any], values: Values, rows: Tensor) -> list[int]:
    if not splits:
        raise NotImplementedError("an even exchange without splits")
    return [int(values[size]) if isinstance(size, fx.Node) else int(size) for size in splits]
