"""From a plan to the sliced graph: along rows here, along experts in `instantiate_experts`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from overlap import collectives, graph
from overlap import placement as pl
from overlap.emitter import Emitter
from overlap.errors import PassError
from overlap.instantiate_experts import ExpertEmitter
from overlap.placement import Base, Counts, Decision, Partial, Split
from overlap.slicing import Plan

aten = torch.ops.aten


def instantiate(gm: fx.GraphModule, plan: Plan, slices: int) -> None:
    """Replace the graph of `gm` by the one in which `slices` slices do what `plan` says.

    Raises PassError, with the graph untouched, where torch cannot run the sliced graph on fake
    values: a size would have to be known that only the data gives.
    """
    emitter = ExpertEmitter if plan.axis == "expert" else RowEmitter
    sliced = fx.GraphModule(gm, emitter(gm, plan, slices).emit())
    try:
        graph.propagate_fake_values(sliced)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise PassError(f"the sliced program does not trace: {first_line}") from error
    gm.graph = sliced.graph


class RowEmitter(Emitter):
    """Slices of consecutive rows; the cut before slice i is at row `rows * i // N`, or at the
    multiple of the plan's unit that comes of counting rows in units.

    lengths: rows of every slice.
    cuts: each slice's part of a whole value, by value, dim and grad mode.
    packed: by exchange of counts, the one of all slices' that stands for it.
    """

    def __init__(self, gm: fx.GraphModule, plan: Plan, num_slices: int) -> None:
        super().__init__(gm, plan, num_slices)
        self.lengths: list[Any] = []
        self.cuts: dict[tuple[fx.Node, int, bool, Any], list[fx.Node]] = {}
        self.packed: dict[fx.Node, fx.Node] = {}

    def begin(self) -> None:
        self.lengths = self._slice_lengths()

    def _slice_lengths(self) -> list[Any]:
        """Rows of every slice."""
        call, rows = self.sizes.call, self.sizes.write(self.plan.batch)
        units = call(operator.floordiv, rows, self.plan.unit) if self.plan.unit > 1 else rows
        shares = [
            call(operator.floordiv, call(operator.mul, units, i), self.num_slices)
            for i in range(self.num_slices)
        ]
        first_rows = [call(operator.mul, share, self.plan.unit) for share in shares]
        ends = [*first_rows[1:], rows]
        return [call(operator.sub, b, a) for a, b in zip(first_rows, ends, strict=True)]

    def emit_slices(self, node: fx.Node, decision: Decision) -> list[Any]:
        if self.plan.axis == "token" and isinstance(decision.placement, Counts):
            if collectives.is_start(node):
                return [self._pack_counts(node)] * self.num_slices
            if collectives.is_wait(node) and (start := collectives.start_of(node)) in self.packed:
                assert start is not None
                return self._unpack_counts(node, start)
        return super().emit_slices(node, decision)

    def _pack_counts(self, start: fx.Node) -> fx.Node:
        """One exchange of the counts of all slices: every rank's block of each, side by side."""
        ranks = len(collectives.splits_of(start)[1])
        blocks = [
            self.derived(aten.view.default, counts, [ranks, -1])
            for counts in self.slices[collectives.rows_of(start)]
        ]
        packed = self.derived(aten.cat.default, blocks, 1)
        ones = [1] * ranks
        args, kwargs = collectives.with_parts(start, packed, ones, ones)
        new = self.derived(start.target, *args, **kwargs)
        self.packed[start] = new
        return new

    def _unpack_counts(self, wait: fx.Node, start: fx.Node) -> list[fx.Node]:
        received = self.derived(wait.target, self.packed[start])
        shape = [int(size) for size in pl.shape_of(wait)]
        width = int(pl.product(pl.shape_of(wait))) // len(collectives.splits_of(start)[1])
        pieces: list[fx.Node] = []
        for i in range(self.num_slices):
            block = self.derived(aten.slice.Tensor, received, 1, i * width, (i + 1) * width)
            pieces.append(self.tagged(self.derived(aten.reshape.default, block, shape), i))
        return pieces

    def operand(self, node: fx.Node, index: int, decision: Decision) -> Any:
        if node in decision.narrow:
            dim, per_batch_row = decision.narrow[node]
            return self._cut(node, dim, per_batch_row)[index]
        if node in self.slices:
            return self.slices[node][index]
        match self.plan.decisions[node].placement:
            case Split(dim, Base(per_batch_row)):
                return self._cut(node, dim, per_batch_row)[index]
            case placement:
                assert not pl.is_sliced(placement), f"{node} is whole and was proven {placement}"
                return self.whole[node]

    def _cut(self, node: fx.Node, dim: int, per_batch_row: sympy.Expr) -> list[fx.Node]:
        """Every slice's rows of a whole value at once: the backward of one split is one cat."""
        use = self.use_of(node)
        for grad in self.grads_that_serve():
            if (node, dim, grad, use) in self.cuts:
                return self.cuts[node, dim, grad, use]
        rows = self.sizes.write(per_batch_row)
        lengths = [self.sizes.call(operator.mul, rows, length) for length in self.lengths]
        split = self.derived(aten.split_with_sizes.default, self.join(node), lengths, dim)
        pieces = [
            self.tagged(self.derived(operator.getitem, split, i), i) for i in range(self.num_slices)
        ]
        self.cuts[node, dim, self.grad, use] = pieces
        return pieces

    def joined(self, node: fx.Node) -> Any:
        return self._joined(self.plan.decisions[node].placement, self.slices[node])

    def _joined(self, placement: pl.Placement, slices: Sequence[fx.Node]) -> Any:
        match placement:
            case Split(dim, Base()):
                return self.derived(aten.cat.default, list(slices), dim)
            case Partial() | Counts():
                add = functools.partial(self.derived, aten.add.Tensor)
                return functools.reduce(add, slices)
            case pl.Many(items):
                parts: list[Any] = []
                for i, item in enumerate(items):
                    pieces = [self.derived(operator.getitem, piece, i) for piece in slices]
                    parts.append(self._joined(item, pieces))
                return parts
            case pl.Whole():
                return slices[0]
            case _:
                raise AssertionError(f"{placement} cannot be joined")
