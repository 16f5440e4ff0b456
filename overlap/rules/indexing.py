"""Gathers and scatters by row numbers, rows picked by a mask, and histograms of ids.

Row numbers may index rows only where they are proven to stay inside the slice: they are a sort's,
a mask's, or runs of received rows. Numbers that come as data are refused along the sliced dim.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from overlap import graph
from overlap import placement as pl
from overlap.placement import Counts, Decision, Many, Op, Split, Whole
from overlap.rules.elementwise import Narrow, align, elementwise
from overlap.rules.reduction import original_order

aten = torch.ops.aten

_NOT_PROVEN = "picks rows by numbers that are not proven to stay inside a slice"
_MASKS = (torch.bool, torch.uint8)


@pl.register_rule(aten.index)
def index(op: Op) -> Decision:
    indices = {dim: by for dim, by in enumerate(op["indices"]) if by is not None}
    if any(graph.fake_value(by).dtype in _MASKS for by in indices.values()):
        raise op.refuse("picks as many rows as a mask of the batch has")
    if len(indices) == 1:
        [(dim, by)] = indices.items()
        return _index_one(op, dim, by)
    return _index_many(op, indices)


@pl.register_rule(aten.index_select)
def index_select(op: Op) -> Decision:
    return _index_one(op, op["dim"] % len(op.shape), op["index"])


def _index_one(op: Op, dim: int, by: fx.Node) -> Decision:
    """`self[:, by]` with `by` at `dim`."""
    place, index_place = op.place(op["self"]), op.place(by)
    match place, index_place:
        case Counts(form), Split(0, rows, pl.Labels(lengths, labels)) if (
            dim == 0 and form.matrix.ndim == 2
        ):
            values = tuple(form.rows[label] for label in labels)
            return Decision(Split(0, rows, pl.Runs(lengths, values)))
        case Counts(form), Whole(constant=tuple() as constant) if (
            dim == 0 and len(pl.shape_of(by)) == 1
        ):
            return Decision(Counts(pl.Form(form.matrix[list(constant)], form.base)))
        case Whole(), Split(at, rows, meaning) if not isinstance(meaning, pl.INDEX_MEANINGS):
            return Decision(Split(dim + at, rows))
        case Split(at, rows, meaning), Whole() if at != dim and len(pl.shape_of(by)) == 1:
            if isinstance(meaning, pl.INDEX_MEANINGS):
                raise op.refuse("picks row numbers as data")
            return Decision(Split(at, rows))
        case Split(at, rows), Split(0, target, pl.RowIndex(of)) if at == dim and rows == of:
            is_permutation = isinstance(target, pl.Base | pl.Sorted) and (
                of.per_batch_row == target.per_batch_row
            )
            return Decision(Split(dim, target, _gathered(op, place.meaning, is_permutation)))
        case Split(0, pl.Received() as rows), Split(0, _, pl.Runs() as runs) if dim == 0:
            return Decision(Split(0, take_runs(op, rows, runs), _gathered(op, place.meaning, True)))
        case Split(0, pl.Received() as rows), Split(0, _, pl.RunsInverse(runs)) if dim == 0:
            return Decision(Split(0, undo_runs(op, rows, runs), _gathered(op, place.meaning, True)))
    raise op.refuse(_NOT_PROVEN)


def _index_many(op: Op, indices: dict[int, fx.Node]) -> Decision:
    """`self[rows, columns]`: row numbers of the slice beside plain data of the same rows."""
    place = op.place(op["self"])
    if list(indices) != list(range(len(indices))) or not isinstance(place, Split):
        raise op.refuse("indexes several dims at once")
    targets: dict[pl.Rows, None] = {}
    for dim, by in indices.items():
        match op.place(by):
            case Split(0, target, pl.RowIndex(of)) if dim == place.dim and of == place.rows:
                targets[target] = None
            case Split(0, target, meaning) if dim != place.dim and not isinstance(
                meaning, pl.INDEX_MEANINGS
            ):
                targets[target] = None
            case _:
                raise op.refuse(_NOT_PROVEN)
    if len(targets) != 1 or place.dim not in indices or _has_meaning(place):
        raise op.refuse(_NOT_PROVEN)
    return Decision(Split(0, next(iter(targets))))


def _has_meaning(split: Split) -> bool:
    return isinstance(split.meaning, pl.INDEX_MEANINGS)


def _gathered(op: Op, meaning: pl.Meaning, is_permutation: bool) -> pl.Meaning:
    """What rows mean after a gather: ids of which some are lost or repeated are another key."""
    match meaning:
        case pl.RowIndex() | pl.Fill():
            return meaning
        case pl.Ids(key, limit):
            return pl.Ids(key if is_permutation else op.node.name, limit)
        case None | pl.OneHot():
            return None
        case _:
            raise op.refuse("permutes row positions")


def take_runs(op: Op, rows: pl.Received, runs: pl.Runs) -> pl.Received:
    """The received rows with their segments in the order in which `runs` reads them."""
    if runs.positions != 1:
        raise op.refuse("reads received rows at positions that are no runs")
    at = {
        (start, segment.length): segment
        for start, segment in zip(
            pl.starts([s.length for s in rows.segments]), rows.segments, strict=True
        )
    }
    taken: list[pl.Segment] = []
    for start, length in zip(runs.reads_from, runs.lengths, strict=True):
        segment = at.pop((start, length), None)
        if segment is None:
            raise op.refuse("reads received rows across the border of a run")
        taken.append(segment)
    if at:
        raise op.refuse("leaves received rows out")
    return pl.Received(rows.dispatch, tuple(taken), rows.back)


def undo_runs(op: Op, rows: pl.Received, runs: pl.Runs) -> pl.Received:
    """The received rows put back where `runs` took them from."""
    if runs.positions != 1 or tuple(s.length for s in rows.segments) != runs.lengths:
        raise op.refuse("puts rows back by another order than they were taken in")
    order = original_order(runs)
    if order is None:
        raise op.refuse("puts two rows in one place")
    return pl.Received(rows.dispatch, tuple(rows.segments[j] for j in order), rows.back)


@pl.register_rule(aten.index_put)
def index_put(op: Op) -> Decision:
    """`out[index] = rows` with an index that is a permutation puts every row in its place."""
    indices = list(op["indices"])
    if op["accumulate"] or indices[0] is None or any(i is not None for i in indices[1:]):
        raise op.refuse("has no rule for these indices")
    decision = _permuted(op, op["self"], indices[0], op["values"])
    if decision is None:
        raise op.refuse("writes rows at numbers that are not proven to be a permutation")
    return decision


@pl.register_rule(aten.index_copy)
def index_copy(op: Op) -> Decision:
    decision = _permuted(op, op["self"], op["index"], op["source"]) if op["dim"] == 0 else None
    if decision is None:
        raise op.refuse("writes rows at numbers that are not proven to be a permutation")
    return decision


def _permuted(op: Op, target: fx.Node, by: fx.Node, values: Any) -> Decision | None:
    """Every row of `target` overwritten by the row of `values` that `by` sends there; None where
    that is not proven."""
    place = op.place(target)
    if not isinstance(values, fx.Node) or len(pl.shape_of(by)) != 1:
        return None
    if len(pl.shape_of(values)) != len(pl.shape_of(target)):
        return None
    match op.place(values), op.place(by):
        case Split(0, pl.Received() as rows, meaning), Split(0, _, pl.Runs() as runs) if (
            _has_length(place, rows.length) and not isinstance(meaning, pl.INDEX_MEANINGS)
        ):
            return Decision(Split(0, undo_runs(op, rows, runs)))
        case Split(0, pl.Length(length), pl.Positions()), Split(
            0, _, pl.Runs(positions=1) as runs
        ) if (
            length == pl.total(runs.lengths)
            and _has_length(place, length)
            and original_order(runs) is not None
        ):
            return Decision(Split(0, pl.Length(length), pl.RunsInverse(runs)))
        case Split(0, rows, meaning), Split(
            0, pl.Sorted() as order, pl.RowIndex(pl.Base() as of)
        ) if (
            rows == order
            and of.per_batch_row == order.per_batch_row
            and not isinstance(meaning, pl.INDEX_MEANINGS)
        ):
            return Decision(Split(0, of), _narrow_target(op, target, of))
    return None


def _has_length(place: pl.Placement, length: pl.Form) -> bool:
    match place:
        case Split(0, (pl.Length() | pl.Received()) as rows):
            return rows.length == length
        case _:
            return False


def _narrow_target(op: Op, node: fx.Node, rows: pl.Base) -> Narrow:
    match op.place(node):
        case Split(0, own, meaning) if own == rows and not isinstance(meaning, pl.INDEX_MEANINGS):
            return {}
        case Whole() if pl.same(pl.shape_of(node)[0], rows.per_batch_row * op.batch):
            return {node: (0, rows.per_batch_row)}
    raise op.refuse(f"writes into {node.name}, whose rows are not the slice's")


@pl.register_rule(aten.index_add, aten.scatter_add)
def scatter_add(op: Op) -> Decision:
    """Ones added up by id are the histogram of the ids; rows added up by row number stay rows."""
    source = op.get("source", op.get("src"))
    if op["dim"] % len(op.shape) != 0:
        return _scatter_inside_rows(op, source)
    match op.place(op["self"]), op.place(op["index"]), op.place(source):
        case Whole(fill=0.0), Split(0, rows, pl.Ids(key, limit)), _ if (
            _fill_of(op, source) == 1.0
            and op.shape == (sympy.Integer(limit),)
            and len(pl.shape_of(op["index"])) == 1
            and op.get("alpha", 1) == 1
        ):
            _, narrow = align(op, [op["index"], source], 1, broadcasts=False)
            return Decision(Counts(pl.identity_form(limit, f"hist:{key}")), narrow)
        case _, Split(0, rows, pl.RowIndex(pl.Base() as of)), Split(0, other, meaning) if (
            rows == other and not isinstance(meaning, pl.INDEX_MEANINGS)
        ):
            return Decision(Split(0, of), _narrow_target(op, op["self"], of))
        case _, Split(0), _:
            raise op.refuse(
                f"adds up rows by {op['index']}, which is neither ids nor rows of the slice",
                "count the ids of topk or argmax as they are",
            )
    return _scatter_inside_rows(op, source)


@pl.register_rule(aten.scatter, aten.scatter_reduce)
def scatter(op: Op) -> Decision:
    source = op.get("src", op.get("value"))
    is_plain = op.packet is aten.scatter and "reduce" not in op.arguments
    index = op["index"]
    if op["dim"] % len(op.shape) == 0 and is_plain and len(op.shape) == 1:
        decision = _permuted(op, op["self"], index, source)
        if decision is not None:
            return decision
    return _scatter_inside_rows(op, source)


def _scatter_inside_rows(op: Op, source: Any) -> Decision:
    """Along a dim that is not sliced, every row scatters into itself."""
    packet = op.packet
    if packet is aten.index_add:
        raise op.refuse("writes rows at numbers that are not proven to stay inside a slice")
    tensors = [n for n in (op["self"], op["index"], source) if isinstance(n, fx.Node)]
    split, narrow = align(op, tensors, len(op.shape), broadcasts=False)
    dim = op["dim"] % len(op.shape)
    if dim == split.dim:
        raise op.refuse("writes rows at numbers that are not proven to stay inside a slice")
    adds_ones = packet is aten.scatter_add or (
        packet is aten.scatter and "reduce" not in op.arguments
    )
    match op.place(op["index"]), _fill_of(op, source), _fill_of(op, op["self"]):
        case Split(meaning=pl.Ids() as ids), 1.0, 0.0 if (
            adds_ones
            and (ids.distinct or packet is aten.scatter_add)
            and dim == len(op.shape) - 1
            and op.shape[-1] == ids.limit
        ):
            return Decision(Split(split.dim, split.rows, pl.OneHot(ids)), narrow)
    return Decision(split, narrow)


def _fill_of(op: Op, value: Any) -> float | None:
    if isinstance(value, bool | int | float):
        return float(value)
    match op.place(value):
        case Split(meaning=pl.Fill(fill)) | Whole(fill=float() as fill):
            return fill
        case _:
            return None


@pl.register_rule(aten.gather, aten.take_along_dim)
def gather(op: Op) -> Decision:
    index_name = "indices" if "indices" in op.arguments else "index"
    dim = None if op["dim"] is None else op["dim"] % len(op.shape)
    match op.place(op["self"]), op.place(op[index_name]):
        case Split(at, rows, meaning), Split(index_at, target, pl.RowIndex(of)) if (
            at == index_at == dim and rows == of and not isinstance(meaning, pl.INDEX_MEANINGS)
        ):
            return Decision(Split(at, target))
    tensors = [op["self"], op[index_name]]
    split, narrow = align(op, tensors, len(op.shape), broadcasts=False)
    if dim in (None, split.dim):
        raise op.refuse(_NOT_PROVEN)
    return Decision(split, narrow)


@pl.register_rule(aten.bincount)
def bincount(op: Op) -> Decision:
    match op.place(op["self"]):
        case Split(0, _, pl.Ids(key, limit)) if op["weights"] is None and op["minlength"] == limit:
            return Decision(Counts(pl.identity_form(limit, f"hist:{key}")))
    raise op.refuse("counts values of unknown range", "pass minlength=the number of experts")


@pl.register_rule(aten.histc)
def histc(op: Op) -> Decision:
    match op.place(op["self"]):
        case Split(_, _, pl.Ids(key, limit)) if (
            op["bins"] == limit and op["min"] == 0 and op["max"] in (limit, limit - 1)
        ):
            return Decision(Counts(pl.identity_form(limit, f"hist:{key}")))
    raise op.refuse("counts values of unknown range", "use bins=E, min=0, max=E for E experts")


@pl.register_rule(aten.where)
def where(op: Op) -> Decision:
    """Element by element; with the condition alone, the numbers of the rows for which it holds."""
    return elementwise(op) if "self" in op.arguments else _picked(op, op["condition"], True)


@pl.register_rule(aten.nonzero, aten.nonzero_numpy)
def nonzero(op: Op) -> Decision:
    return _picked(op, op["self"], op.packet is aten.nonzero_numpy)


def _picked(op: Op, mask: fx.Node, is_numpy: bool) -> Decision:
    """The rows for which a mask holds, as numbers of the slice's own rows: a value per dim."""
    place = op.place(mask)
    num_dims = len(pl.shape_of(mask))
    match place:
        case Split(dim, pl.Base() as of, meaning) if not isinstance(meaning, pl.INDEX_MEANINGS):
            rows = pl.Picked(op.node.name)
            items = tuple(
                Split(0, rows, pl.RowIndex(of) if d == dim else None) for d in range(num_dims)
            )
        case _:
            raise op.refuse("has no rule for this operand")
    if is_numpy:
        return Decision(Many(items))
    if num_dims != 1:
        raise op.refuse("numbers rows and columns in one value", "use torch.where(mask)")
    return Decision(items[0])


@pl.register_rule(aten.masked_select)
def masked_select(op: Op) -> Decision:
    raise op.refuse("picks as many elements as a mask of the batch has")


def _repeat_each(op: Op, place: Split, times: int) -> Decision:
    """Every row `times` times in a row, the order of (row, choice) pairs."""
    if op["dim"] is None or _has_meaning(place):
        raise op.refuse("repeats the elements of a flattened batch")
    if op["dim"] % len(op.shape) != place.dim:
        return Decision(Split(place.dim, place.rows))
    match place.rows:
        case pl.Base(per_batch_row):
            return Decision(Split(place.dim, pl.Base(times * per_batch_row)))
    raise op.refuse("repeats rows that are in a slice's own order")


@pl.register_rule(aten.repeat_interleave)
def repeat_interleave(op: Op) -> Decision:
    """A table repeated by counts is constant on runs as long as the counts."""
    repeats = op["repeats"]
    source = op.get("self")
    place, by = op.place(source), op.place(repeats)
    if isinstance(place, Split) and isinstance(repeats, int):
        return _repeat_each(op, place, repeats)
    if not isinstance(by, Counts) or len(by.form.matrix.shape) != 2:
        raise op.refuse("repeats rows by numbers of unknown origin")
    if op["output_size"] is not None and op.place(op["output_size"]) != pl.Scalar(
        pl.total(by.form.rows)
    ):
        raise op.refuse("is given a size that is not the sum of its repeats")
    lengths = by.form.rows
    rows = pl.Length(pl.total(lengths))
    match place:
        case _ if source is None:
            return Decision(Split(0, rows, pl.Labels(lengths, tuple(range(len(lengths))))))
        case Counts(form) if len(form.matrix.shape) == 2 and form.base == by.form.base:
            return Decision(Split(0, rows, pl.Runs(lengths, form.rows)))
        case Whole(constant=constant) if constant is not None and len(constant) == len(lengths):
            return Decision(Split(0, rows, pl.Labels(lengths, constant)))
    raise op.refuse("repeats a table of unknown values")
