"""Writes the sliced graph of a plan along experts.

    sorted rows   | to rank 0: e0 e1 e2 e3 | to rank 1: e4 e5 e6 e7 |
    slice 0       | e0 e1 | e4 e5 |   dispatch, experts, combine
    slice 1       | e2 e3 | e6 e7 |   dispatch, experts, combine

A slice's counts are the whole's with zeros for the experts of others; everything from counts to
splits, indices and sizes is computed from those, and what is zero for every input is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from overlap import collectives, graph, islands, slicing
from overlap import placement as pl
from overlap.emitter import Emitter
from overlap.errors import PassError
from overlap.placement import Counts, Decision, Form, Partial, Scalar, Split
from overlap.slicing import Island, Plan

aten = torch.ops.aten
_SPLITS = (aten.split, aten.split_with_sizes)
_CATS = (aten.cat, aten.concat)


@dataclasses.dataclass(frozen=True)
class _OnePiece:
    """What a split of rows leaves where all but one of its pieces are other slices'."""

    position: int
    rows: fx.Node


class ExpertEmitter(Emitter):
    """Slices of each rank's experts. Islands of fewer experts than slices have fewer slices.

    masked: each slice's part of whole counts.
    taken: by dispatch, combine and its wait, how many rows of each rank every slice has.
    runs: by sorted rows and dispatch, the runs that they are cut into.
    """

    def __init__(self, gm: fx.GraphModule, plan: Plan, num_slices: int) -> None:
        super().__init__(gm, plan, num_slices)
        self.masked: dict[tuple[fx.Node, int], fx.Node] = {}
        self.taken: dict[fx.Node, list[list[Any]]] = {}
        self.runs: dict[tuple[fx.Node, fx.Node, bool], list[fx.Node]] = {}

    # what a slice has

    def emit_slices(self, node: fx.Node, decision: Decision) -> list[Any]:
        number = self._number_of_slices(node)
        if collectives.is_start(node):
            outs, ins = collectives.splits_of(node)
            splits = ins if self._is_dispatch(node) else outs
            self.taken[node] = [[self._scalar(n, i) for n in splits] for i in range(number)]
        elif collectives.is_wait(node):
            start = collectives.start_of(node)
            assert start is not None
            self.taken[node] = self.taken[start]
        return [self._emit_part(node, decision, i) for i in range(number)]

    def _number_of_slices(self, node: fx.Node) -> int:
        keys = slicing.routing_keys(self.plan.decisions[node].placement)
        for key in sorted(keys & self.plan.islands.keys()):
            return min(self.num_slices, self.plan.islands[key].experts)
        return next(len(self.slices[n]) for n in node.all_input_nodes if n in self.slices)

    def _is_dispatch(self, node: fx.Node) -> bool:
        return isinstance(getattr(self.plan.decisions[node].placement, "rows", None), pl.Received)

    def _experts(self, island: Island, index: int) -> range:
        return island.experts_of(index, min(self.num_slices, island.experts))

    def _emit_part(self, node: fx.Node, decision: Decision, index: int) -> Any:
        """The node for one slice; None where it has no rows there, a number where it is known."""
        if self._has_nothing(decision.placement, index):
            return None
        if isinstance(decision.placement, Scalar) and self._is_zero(decision.placement.form, index):
            return 0
        if node.target is operator.getitem:
            return self._item(node, decision, index)
        if graph.is_call(node, *_SPLITS):
            return self._split(node, decision, index)
        if graph.is_call(node, *_CATS) and isinstance(decision.placement, Split):
            return self._cat(node, decision, index)
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._number(node, decision, index)
        if graph.is_call(node, *graph.ASSERTIONS) and not isinstance(
            self.operand(node.all_input_nodes[0], index, decision), fx.Node
        ):
            return None
        return self.emit_slice(node, decision, index)

    def _has_nothing(self, placement: pl.Placement, index: int) -> bool:
        match placement:
            case Split(_, pl.Received(_, segments, back)) if back.key in self.plan.islands:
                mine = self._experts(self.plan.islands[back.key], index)
                return not any(segment.label[1] in mine for segment in segments)
            case _:
                return False

    def _is_zero(self, form: Form, index: int) -> bool:
        """Whether a form of the counts is zero for a slice, however many rows its experts get."""
        [key] = slicing.routing_keys(Scalar(form))
        island = self.plan.islands[key]
        is_mine = np.zeros(island.experts, dtype=bool)
        is_mine[list(self._experts(island, index))] = True
        return not form.matrix[..., np.tile(is_mine, island.ranks)].any()

    # nodes with a form of their own

    def _item(self, node: fx.Node, decision: Decision, index: int) -> Any:
        source, position = graph.args_of(node)
        match self.slices[source][index]:
            case _OnePiece(only, rows):
                assert only == position, f"{node} is a piece of another slice"
                return rows
            case _:
                return self.emit_slice(node, decision, index)

    def _split(self, node: fx.Node, decision: Decision, index: int) -> Any:
        if isinstance(decision.placement, pl.Many):
            items = decision.placement.items
            here = [k for k, item in enumerate(items) if not self._has_nothing(item, index)]
            if len(here) == 1 and isinstance(items[here[0]], Split):
                source = pl.schema_arguments(node)["self"]
                return _OnePiece(here[0], self.operand(source, index, decision))
        return self.emit_slice(node, decision, index)

    def _cat(self, node: fx.Node, decision: Decision, index: int) -> Any:
        tensors = pl.schema_arguments(node)["tensors"]
        pieces = [self.slices[n][index] for n in tensors]
        here = [piece for piece in pieces if piece is not None]
        if len(here) == 1:
            return here[0]
        dim = pl.schema_arguments(node)["dim"]
        return self.tagged(self.derived(aten.cat.default, here, dim), index)

    def _number(self, node: fx.Node, decision: Decision, index: int) -> Any:
        """Arithmetic on sizes, done here where all of them are known."""
        args: Any = fx.map_arg(node.args, lambda n: self.operand(n, index, decision))
        if node.target is torch.sym_sum:
            terms = [term for term in args[0] if not isinstance(term, int) or term != 0]
            if len(terms) == 1:
                return terms[0]
            return self.tagged(self.derived(torch.sym_sum, tuple(terms)), index)
        found: list[fx.Node] = []
        fx.map_arg(args, found.append)
        assert callable(node.target)
        return self.emit_slice(node, decision, index) if found else node.target(*args)

    def emit_slice(self, node: fx.Node, decision: Decision, index: int) -> Any:
        if decision.groups is None:
            return super().emit_slice(node, decision, index)
        new = super().emit_slice(node, decision, index)
        self._take_groups(new, decision.groups, index)
        return new

    def _take_groups(self, new: fx.Node, groups: pl.Groups, index: int) -> None:
        """Leave out the groups of other slices, where the slice's own are neighbours."""
        [key] = slicing.routing_keys(Scalar(groups.groups[0].length))
        mine = self._experts(self.plan.islands[key], index)
        here = [g for g, group in enumerate(groups.groups) if group.experts & set(mine)]
        if here != list(range(here[0], here[-1] + 1)) or len(here) == len(groups.groups):
            return
        arguments = pl.schema_arguments(new)
        with self.graph.inserting_before(new):
            for name, dim in groups.arguments.items():
                part = self.derived(aten.slice.Tensor, arguments[name], dim, here[0], here[-1] + 1)
                new.replace_input_with(arguments[name], part)

    # operands

    def operand(self, node: fx.Node, index: int, decision: Decision) -> Any:
        if node in self.slices and not islands.is_returned(node, self.plan):
            part = self.slices[node][index]
            if part is None:
                raise PassError(f"{node.name} has no rows in a slice that reads it")
            return part
        placement = self.plan.decisions[node].placement
        keys = slicing.routing_keys(placement) & self.plan.islands.keys()
        match placement:
            case Counts(form) if keys and form.is_identity:
                return self._masked_counts(node, self.plan.islands[min(keys)], index)
            case Split(0, pl.Sorted()) if self.current in self.taken:
                return self._rows_of(node, index)
            case _ if pl.is_sliced(placement):
                raise PassError(
                    f"{node.name} is read by slices of experts, and was proven {placement}"
                )
            case _:
                return self.whole[node]

    def _scalar(self, value: Any, index: int) -> Any:
        return self.slices[value][index] if isinstance(value, fx.Node) else value

    def _masked_counts(self, node: fx.Node, island: Island, index: int) -> fx.Node:
        """Whole counts with zeros for the experts of other slices."""
        if (node, index) not in self.masked:
            mine = self._experts(island, index)
            pads = [mine.start, island.experts - mine.stop]
            counts = self.derived(
                aten.view.default, self.whole[node], [island.ranks, island.experts]
            )
            counts = self.derived(aten.slice.Tensor, counts, 1, mine.start, mine.stop)
            counts = self.derived(aten.constant_pad_nd.default, counts, pads)
            shape = [int(size) for size in pl.shape_of(node)]
            self.masked[node, index] = self.tagged(
                self.derived(aten.view.default, counts, shape), index
            )
        return self.masked[node, index]

    def _rows_of(self, node: fx.Node, index: int) -> fx.Node:
        """A slice's part of sorted rows: its run of every destination's rows."""
        assert self.current is not None
        taken = self.taken[self.current]
        ranks = len(taken[0])
        lengths = [part[rank] for rank in range(ranks) for part in taken]
        key = (node, self.current, self.grad)
        if key not in self.runs:
            split = self.derived(aten.split_with_sizes.default, self.join(node), lengths, 0)
            self.runs[key] = [self.derived(operator.getitem, split, k) for k in range(len(lengths))]
        mine = self.runs[key][index :: len(taken)]
        return self.tagged(self.derived(aten.cat.default, mine, 0), index)

    # the whole

    def joined(self, node: fx.Node) -> Any:
        parts = self.slices[node]
        match self.plan.decisions[node].placement:
            case Counts() | Partial():
                add = functools.partial(self.derived, aten.add.Tensor)
                return functools.reduce(add, [part for part in parts if part is not None])
            case Scalar():
                return self.derived(torch.sym_sum, tuple(parts))
            case Split(0, pl.Sorted()) if node in self.taken:
                return self._put_back(parts, self.taken[node])
            case pl.Whole():
                return self._whole_or_first(node)
            case placement:
                raise PassError(f"{node.name}, which was proven {placement}, cannot be joined")

    def _put_back(self, parts: Sequence[fx.Node], taken: Sequence[Sequence[Any]]) -> fx.Node:
        """The runs of all slices in the order of the program: by rank, then by expert."""
        runs: list[list[fx.Node]] = []
        for part, lengths in zip(parts, taken, strict=True):
            split = self.derived(aten.split_with_sizes.default, part, list(lengths), 0)
            runs.append(
                [self.derived(operator.getitem, split, rank) for rank in range(len(lengths))]
            )
        return self.derived(
            aten.cat.default, [run for by_rank in zip(*runs, strict=True) for run in by_rank], 0
        )
