"""Operators that read a whole dim: reductions, scans, softmax, sorting. Along a dim that is not
sliced they pass; along the sliced dim only a sum has an answer, a partial sum."""

from __future__ import annotations

import torch

from overlap import placement as pl
from overlap.placement import Counts, Decision, Many, Op, Partial, Split
from overlap.rules.shape import carry, linear_on_counts

aten = torch.ops.aten


def _split(op: Op, name: str = "self") -> Split:
    place = op.place(op[name])
    if not isinstance(place, Split):
        raise op.refuse("is not linear in a sum over the slices")
    if isinstance(place.meaning, pl.INDEX_MEANINGS):
        raise op.refuse("reads row numbers as data")
    return place


def _dims(op: Op, num_dims: int) -> list[int]:
    dims = op.get("dim")
    if dims is None or dims == []:
        return list(range(num_dims))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [d % num_dims for d in listed]


def _after(op: Op, split: Split, dims: list[int]) -> Split:
    removed = 0 if op.get("keepdim") else sum(d < split.dim for d in dims)
    return Split(split.dim - removed, split.rows)


@pl.register_rule(aten.sum)
def sum_(op: Op) -> Decision:
    source = op["self"]
    place = op.place(source)
    if isinstance(place, Counts):
        return linear_on_counts(op)
    if isinstance(place, Partial):
        return Decision(Partial())
    split = _split(op)
    num_dims = len(pl.shape_of(source))
    dims = _dims(op, num_dims)
    if split.dim not in dims:
        return Decision(_after(op, split, dims))
    match split.meaning:
        case pl.OneHot(ids) if sorted(dims) == list(range(num_dims - 1)):
            return Decision(Counts(pl.identity_form(ids.limit, f"hist:{ids.key}")))
    return Decision(Partial(), reassociates=f"{op.node.name}: sum over sliced rows")


@pl.register_rule(
    aten.mean, aten.amax, aten.amin, aten.prod, aten.any, aten.all, aten.norm,
    aten.linalg_vector_norm, aten.logsumexp, aten.var, aten.std,
)  # fmt: skip
def reduction(op: Op) -> Decision:
    split = _split(op)
    dims = _dims(op, len(pl.shape_of(op["self"])))
    if split.dim in dims:
        raise op.refuse("mixes rows of different slices")
    return Decision(_after(op, split, dims))


@pl.register_rule(aten.max, aten.min)
def extreme(op: Op) -> Decision:
    split = _split(op)
    if "dim" not in op.arguments or "other" in op.arguments:
        raise op.refuse("mixes rows of different slices")
    dims = _dims(op, len(pl.shape_of(op["self"])))
    if split.dim in dims:
        raise op.refuse("mixes rows of different slices")
    item = _after(op, split, dims)
    return Decision(Many((item, item)))


@pl.register_rule(
    aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax, aten.cumsum, aten.cumprod,
    aten.logcumsumexp,
)  # fmt: skip
def scan(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _split(op)
    if op["dim"] % len(op.shape) == split.dim:
        raise op.refuse("mixes rows of different slices")
    return Decision(Split(split.dim, split.rows))


@pl.register_rule(aten.flip, aten.roll)
def move_rows(op: Op) -> Decision:
    split = _split(op)
    dims = op["dims"]
    listed = [dims] if isinstance(dims, int) else list(dims)
    if not listed or split.dim in [d % len(op.shape) for d in listed]:
        raise op.refuse("mixes rows of different slices")
    return Decision(Split(split.dim, split.rows))


@pl.register_rule(aten.topk)
def topk(op: Op) -> Decision:
    split = _split(op)
    num_dims = len(pl.shape_of(op["self"]))
    dim = op["dim"] % num_dims
    if dim == split.dim:
        raise op.refuse("mixes rows of different slices")
    values = Split(split.dim, split.rows)
    return Decision(Many((values, _ids(op, split, dim, distinct=dim == num_dims - 1))))


@pl.register_rule(aten.argmax, aten.argmin)
def argmax(op: Op) -> Decision:
    split = _split(op)
    if op.get("dim") is None:
        raise op.refuse("mixes rows of different slices")
    dim = op["dim"] % len(pl.shape_of(op["self"]))
    if dim == split.dim:
        raise op.refuse("mixes rows of different slices")
    after = _after(op, split, [dim])
    ids = _ids(op, split, dim, distinct=False)
    return Decision(Split(after.dim, after.rows, ids.meaning))


def _ids(op: Op, split: Split, dim: int, distinct: bool) -> Split:
    """Positions along a dim of known size are keys of the row, in [0, size)."""
    size = pl.shape_of(op["self"])[dim]
    meaning = pl.Ids(op.node.name, int(size), distinct) if size.is_Integer else None
    return Split(split.dim, split.rows, meaning)


@pl.register_rule(aten.sort, aten.argsort)
def sort(op: Op) -> Decision:
    is_argsort = op.node.target.overloadpacket is aten.argsort
    place = op.place(op["self"])
    if not isinstance(place, Split):
        raise op.refuse("is not linear in a sum over the slices")
    num_dims = len(pl.shape_of(op["self"]))
    if op.get("dim", -1) % num_dims != place.dim:
        item = Split(place.dim, place.rows, None)
        if isinstance(place.meaning, pl.INDEX_MEANINGS):
            raise op.refuse("sorts row numbers as data")
        return Decision(item if is_argsort else Many((item, item)))
    indices = _sorted_indices(op, place, num_dims)
    if is_argsort:
        return Decision(indices)
    values = Split(place.dim, indices.rows, carry(place.meaning))
    if isinstance(place.meaning, pl.INDEX_MEANINGS):
        values = Split(place.dim, indices.rows, pl.Positions())
    return Decision(Many((values, indices)))


def _sorted_indices(op: Op, place: Split, num_dims: int) -> Split:
    """Row numbers that sort a one-dim value, where what it holds makes their order known."""
    if num_dims == 1 and not op.get("descending"):
        match place.meaning, place.rows:
            case pl.Ids(key, _), pl.Base(per_batch_row) as base:
                rows = pl.Sorted(op.node.name, key, per_batch_row)
                return Split(0, rows, pl.RowIndex(base))
            case pl.RowIndex(of), pl.Sorted() as rows if of == pl.Base(rows.per_batch_row):
                return Split(0, of, pl.RowIndex(rows))
            case pl.Runs(lengths, _, 1) as runs, rows if _is_permutation(runs):
                return Split(0, pl.Length(pl.total(lengths)), pl.RunsInverse(runs))
            case pl.Labels(lengths, values), rows if op.get("stable"):
                order = sorted(range(len(values)), key=lambda j: values[j])
                begin = pl.starts(lengths)
                picked = tuple(lengths[j] for j in order)
                offsets = tuple(
                    pl.Form(begin[j].matrix - s.matrix, s.base)
                    for j, s in zip(order, pl.starts(picked), strict=True)
                )
                return Split(0, pl.Length(pl.total(lengths)), pl.Runs(picked, offsets, 1))
    raise op.refuse("puts rows of different slices in one order")


def _is_permutation(runs: pl.Runs) -> bool:
    return original_order(runs) is not None


def original_order(runs: pl.Runs) -> tuple[int, ...] | None:
    """Which run covers the first rows of what `runs` reads, which the next, and so on; None where
    the runs do not tile it exactly once."""
    remaining = dict(enumerate(runs.reads_from))
    reached = pl.Form(0 * runs.lengths[0].matrix, runs.lengths[0].base)
    order: list[int] = []
    while remaining:
        match [j for j, start in remaining.items() if start == reached]:
            case [j, *_]:
                order.append(j)
                del remaining[j]
                reached = reached + runs.lengths[j]
            case _:
                return None
    return tuple(order)


@pl.register_rule(aten.cross_entropy_loss, aten.nll_loss)
def cross_entropy(op: Op) -> Decision:
    """Per-row losses are sliced; a reduced loss joins its rows, so that it is summed as written."""
    if op["reduction"] != 0 or op["weight"] is not None:
        raise op.refuse("reduces over rows")
    input_place, target_place = op.place(op["self"]), op.place(op["target"])
    match input_place, target_place:
        case Split(0, rows), Split(0, other) if rows == other and len(op.shape) == 1:
            return Decision(Split(0, rows))
    raise op.refuse("has no rule for these operands")
