"""Gathers and scatters by row numbers, and histograms of ids."""

from __future__ import annotations

import torch
from torch import fx

from overlap import placement as pl
from overlap.placement import Counts, Decision, Op, Split, Whole
from overlap.rules.elementwise import align
from overlap.rules.reduction import original_order
from overlap.rules.shape import linear_on_counts

aten = torch.ops.aten


@pl.register_rule(aten.index, aten.index_select)
def index(op: Op) -> Decision:
    is_select = op.node.target.overloadpacket is aten.index_select
    if is_select and op["dim"] != 0:
        return _along_other_dim(op, op["dim"], op["index"])
    indices = [op["index"]] if is_select else list(op["indices"])
    used = [i for i in indices if i is not None]
    if len(used) != 1:
        raise op.refuse("indexes several dims at once")
    if indices[0] is None:
        return _along_other_dim(op, indices.index(used[0]), used[0])
    place, by = op.place(op["self"]), op.place(used[0])
    match place, by:
        case Counts(form), Split(0, rows, pl.Labels(lengths, labels)):
            values = tuple(form.rows[label] for label in labels)
            return Decision(Split(0, rows, pl.Runs(lengths, values)))
        case Counts(), Whole(constant=constant) if constant is not None:
            form = pl.Form(place.form.matrix[list(constant)], place.form.base)
            return Decision(Counts(form))
        case Counts(), Whole():
            return linear_on_counts(op)
        case Whole(), Split(dim, rows, meaning) if not isinstance(meaning, pl.INDEX_MEANINGS):
            return Decision(Split(dim, rows), reassociates=f"{op.node.name}: gradient of a table")
        case Split(0, rows), Split(0, target, pl.RowIndex(of)) if rows == of:
            return Decision(Split(0, target, _index_free(op, place.meaning)))
        case Split(0, pl.Received() as rows), Split(0, _, pl.Runs() as runs):
            return Decision(Split(0, take_runs(op, rows, runs), _index_free(op, place.meaning)))
        case Split(0, pl.Received() as rows), Split(0, _, pl.RunsInverse(runs)):
            return Decision(Split(0, undo_runs(op, rows, runs), _index_free(op, place.meaning)))
    raise op.refuse("picks rows by numbers that are not proven to stay inside a slice")


def _index_free(op: Op, meaning: pl.Meaning) -> pl.Meaning:
    """A gather permutes rows, so row numbers stay row numbers and ids stay ids of the row."""
    match meaning:
        case pl.RowIndex() | pl.Fill():
            return meaning
        case None | pl.Ids() | pl.OneHot():
            return None
        case _:
            raise op.refuse("permutes row positions")


def _along_other_dim(op: Op, dim: int, by: fx.Node) -> Decision:
    place = op.place(op["self"])
    if isinstance(place, Split) and isinstance(op.place(by), Whole) and dim != place.dim:
        if isinstance(place.meaning, pl.INDEX_MEANINGS) or len(pl.shape_of(by)) != 1:
            raise op.refuse("has no rule for these operands")
        return Decision(Split(place.dim, place.rows))
    raise op.refuse("picks rows by numbers that are not proven to stay inside a slice")


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
    if tuple(s.length for s in rows.segments) != runs.lengths:
        raise op.refuse("puts rows back by another order than they were taken in")
    order = original_order(runs)
    if order is None:
        raise op.refuse("puts two rows in one place")
    return pl.Received(rows.dispatch, tuple(rows.segments[j] for j in order), rows.back)


@pl.register_rule(aten.index_put)
def index_put(op: Op) -> Decision:
    """`out[index] = rows` with an index that is a permutation puts every row in its place."""
    indices = list(op["indices"])
    target, values = op.place(op["self"]), op.place(op["values"])
    if op["accumulate"] or len(indices) != 1 or indices[0] is None:
        raise op.refuse("has no rule for these indices")
    match values, op.place(indices[0]):
        case Split(0, pl.Received() as rows), Split(0, _, pl.Runs() as runs) if isinstance(
            target, Split
        ):
            return Decision(Split(0, undo_runs(op, rows, runs)))
        case Split(0, rows), Split(0, order, pl.RowIndex(of)) if rows == order and (
            isinstance(of, pl.Base)
            and isinstance(order, pl.Sorted)
            and of.per_batch_row == order.per_batch_row
        ):
            return Decision(Split(0, of), _narrow_target(op, op["self"], of))
    raise op.refuse("writes rows at numbers that are not proven to be a permutation")


def _narrow_target(op: Op, node: fx.Node, rows: pl.Base) -> dict[fx.Node, tuple[int, object]]:
    match op.place(node):
        case Split(0, own) if own == rows:
            return {}
        case Whole() if pl.same(pl.shape_of(node)[0], rows.per_batch_row * op.batch):
            return {node: (0, rows.per_batch_row)}
    raise op.refuse(f"writes into {node.name}, whose rows are not the slice's")


@pl.register_rule(aten.index_add, aten.scatter_add, aten.scatter, aten.scatter_reduce)
def scatter(op: Op) -> Decision:
    packet = op.node.target.overloadpacket
    source_name = "source" if packet is aten.index_add else "src"
    source = op.get(source_name, op.get("value"))
    if op["dim"] % len(op.shape) == 0:
        match op.place(op["self"]), op.place(op["index"]), op.place(source):
            case Whole(fill=0.0), Split(0, rows, pl.Ids(key, limit)), Split(
                0, other, pl.Fill(1.0)
            ) if (
                rows == other
                and packet in (aten.scatter_add, aten.index_add)
                and op.shape == (pl.sympy.Integer(limit),)
                and len(pl.shape_of(op["index"])) == 1
                and op.get("alpha", 1) == 1
            ):
                return Decision(Counts(pl.identity_form(limit, f"hist:{key}")))
            case _, Split(0, rows, pl.RowIndex(pl.Base() as of)), Split(0, other, meaning) if (
                rows == other
                and packet in (aten.scatter_add, aten.index_add)
                and not isinstance(meaning, pl.INDEX_MEANINGS)
            ):
                return Decision(Split(0, of), _narrow_target(op, op["self"], of))
    return _elementwise_scatter(op, source)


def _elementwise_scatter(op: Op, source: object) -> Decision:
    """Along a dim that is not sliced, every row scatters into itself."""
    tensors = [n for n in (op["self"], op["index"], source) if isinstance(n, fx.Node)]
    split, narrow = align(op, tensors, len(op.shape))
    if op["dim"] % len(op.shape) == split.dim:
        raise op.refuse("writes rows at numbers that are not proven to stay inside a slice")
    packet = op.node.target.overloadpacket
    if packet is aten.index_add:
        raise op.refuse("has no rule for these operands")
    is_last = op["dim"] % len(op.shape) == len(op.shape) - 1
    match op.place(op["index"]), _fill_of(op, source), _fill_of(op, op["self"]):
        case Split(meaning=pl.Ids(distinct=True) as ids), 1.0, 0.0 if (
            is_last and op.shape[-1] == ids.limit and packet is aten.scatter
        ):
            return Decision(Split(split.dim, split.rows, pl.OneHot(ids)), narrow)
    return Decision(split, narrow)


def _fill_of(op: Op, value: object) -> float | None:
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
    split, narrow = align(op, [op["self"], op[index_name]], len(op.shape))
    if op["dim"] is None or op["dim"] % len(op.shape) == split.dim:
        raise op.refuse("picks rows by numbers that are not proven to stay inside a slice")
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


@pl.register_rule(aten.repeat_interleave)
def repeat_interleave(op: Op) -> Decision:
    """A table repeated by counts is constant on runs as long as the counts."""
    repeats = op["repeats"]
    source = op.get("self")
    place, by = op.place(source), op.place(repeats)
    if isinstance(place, Split) and isinstance(repeats, int):
        dim = op["dim"]
        if dim is None or dim % len(op.shape) == place.dim:
            raise op.refuse("repeats rows of the batch")
        return Decision(Split(place.dim, place.rows))
    if not isinstance(by, Counts) or len(by.form.matrix.shape) != 2:
        raise op.refuse("repeats rows by numbers of unknown origin")
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
