"""Operators that read a whole dim: reductions, scans, softmax, sorting. Along a dim that is not
sliced they pass; along the sliced dim only a sum has an answer, a partial sum."""

from __future__ import annotations

import torch

from overlap import placement as pl
from overlap.placement import Counts, Decision, Many, Op, Partial, Split, Whole
from overlap.rules.elementwise import Narrow, elementwise, narrow_to
from overlap.rules.shape import linear_on_counts

aten = torch.ops.aten


def _split(op: Op, name: str = "self") -> Split:
    place = op.place(op[name])
    if not isinstance(place, Split):
        raise op.refuse(f"is not linear in {op[name]}, a sum over the slices")
    if isinstance(place.meaning, pl.INDEX_MEANINGS):
        raise op.refuse("reads row numbers as data, and they hold inside one slice only")
    return place


def _dims(op: Op, num_dims: int) -> list[int]:
    """The dims that the operator reads; all of them where none is named."""
    dims = op.get("dim")
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(num_dims))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [d % num_dims for d in listed]


def _mixes(op: Op, dim: int) -> pl.Refusal:
    return op.refuse(
        f"reads along dim {dim}, along which the batch is sliced: it mixes rows of slices",
        "move it behind the last exchange, or read along another dim",
    )


def _kept_dims(op: Op) -> tuple[Split, list[int]]:
    """The operand and the dims it is read along, none of them the sliced one."""
    split = _split(op)
    dims = _dims(op, len(pl.shape_of(op["self"])))
    if split.dim in dims:
        raise _mixes(op, split.dim)
    return split, dims


def _after(op: Op, split: Split, dims: list[int]) -> Split:
    removed = 0 if op.get("keepdim") else sum(d < split.dim for d in dims)
    return Split(split.dim - removed, split.rows)


@pl.register_rule(aten.sum)
def sum_(op: Op) -> Decision:
    """Over rows a partial sum; of a one-hot form, exact counts."""
    source = op["self"]
    place = op.place(source)
    if isinstance(place, Counts):
        return linear_on_counts(op)
    if isinstance(place, Partial):
        return Decision(Partial())
    split = _split(op)
    last = len(pl.shape_of(source)) - 1
    dims = _dims(op, last + 1)
    match split.meaning:
        case pl.OneHot(ids) if sorted(dims) == list(range(last)) and split.dim != last:
            matrix = pl.identity_form(ids.limit, f"hist:{ids.key}").matrix
            form = pl.Form(matrix.reshape(*map(int, op.shape), ids.limit), f"hist:{ids.key}")
            return Decision(Counts(form))
        case pl.OneHot() if split.dim not in dims and last not in dims:
            after = _after(op, split, dims)
            return Decision(Split(after.dim, after.rows, split.meaning))
    if split.dim not in dims:
        return Decision(_after(op, split, dims))
    return Decision(Partial(), reassociates=f"{op.node.name}: sum over sliced rows")


@pl.register_rule(
    aten.mean, aten.amax, aten.amin, aten.prod, aten.any, aten.all, aten.norm,
    aten.linalg_vector_norm, aten.logsumexp, aten.var, aten.std, aten.count_nonzero,
)  # fmt: skip
def reduction(op: Op) -> Decision:
    return Decision(_after(op, *_kept_dims(op)))


@pl.register_rule(aten.max, aten.min)
def extreme(op: Op) -> Decision:
    if "other" in op.arguments:
        return elementwise(op)
    item = _after(op, *_kept_dims(op))
    return Decision(Many((item, item)))


@pl.register_rule(aten.var_mean, aten.std_mean, aten.kthvalue, aten.median, aten.mode)
def pair_of_reductions(op: Op) -> Decision:
    item = _after(op, *_kept_dims(op))
    return Decision(Many((item, item)))


@pl.register_rule(aten.cumsum)
def cumsum(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    return along_dim(op)


@pl.register_rule(
    aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax, aten.cumprod,
    aten.logcumsumexp, aten.glu,
)  # fmt: skip
def along_dim(op: Op) -> Decision:
    split, _ = _kept_dims(op)
    return Decision(Split(split.dim, split.rows))


@pl.register_rule(aten.cummax, aten.cummin)
def pair_along_dim(op: Op) -> Decision:
    split, _ = _kept_dims(op)
    item = Split(split.dim, split.rows)
    return Decision(Many((item, item)))


@pl.register_rule(aten.flip, aten.roll)
def move_rows(op: Op) -> Decision:
    split = _split(op)
    dims = op["dims"]
    listed = [dims] if isinstance(dims, int) else list(dims)
    if not listed or split.dim in [d % len(op.shape) for d in listed]:
        raise op.refuse(
            f"mixes rows of different slices: it moves them along dim {split.dim}, the sliced one"
        )
    return Decision(Split(split.dim, split.rows))


@pl.register_rule(aten.topk)
def topk(op: Op) -> Decision:
    split, [dim] = _kept_dims(op)
    is_last = dim == len(op_shape(op)) - 1
    return Decision(Many((Split(split.dim, split.rows), _ids(op, split, dim, distinct=is_last))))


def op_shape(op: Op) -> tuple[pl.sympy.Expr, ...]:
    return pl.shape_of(op["self"])


@pl.register_rule(aten.argmax, aten.argmin)
def argmax(op: Op) -> Decision:
    split, dims = _kept_dims(op)
    after = _after(op, split, dims)
    return Decision(Split(after.dim, after.rows, _ids(op, split, dims[0], False).meaning))


def _ids(op: Op, split: Split, dim: int, distinct: bool) -> Split:
    """Positions along a dim of known size are keys of the row, in [0, size)."""
    size = op_shape(op)[dim]
    meaning = pl.Ids(op.node.name, int(size), distinct) if size.is_Integer else None
    return Split(split.dim, split.rows, meaning)


@pl.register_rule(aten.sort, aten.argsort)
def sort(op: Op) -> Decision:
    """Along another dim each row sorts itself. Along the rows, what a value holds may make the
    order known: ids give groups, permutations their inverse."""
    is_argsort = op.packet is aten.argsort
    place = op.place(op["self"])
    if not isinstance(place, Split):
        raise op.refuse(f"is not linear in {op['self']}, a sum over the slices")
    num_dims = len(op_shape(op))
    if op["dim"] % num_dims != place.dim:
        split = _split(op)
        values = indices = Split(split.dim, split.rows)
    else:
        values, indices = _sorted_rows(op, place, num_dims)
    return Decision(indices if is_argsort else Many((values, indices)))


def _sorted_rows(op: Op, place: Split, num_dims: int) -> tuple[Split, Split]:
    """The values of a one-dim operand in order, and the row numbers that put them there."""
    if op["descending"] and isinstance(place.meaning, pl.Ids):
        raise op.refuse("sorts ids from high to low", "sort them from low to high")
    if num_dims == 1 and not op["descending"]:
        match place.meaning, place.rows:
            case pl.Ids() as ids, pl.Base(per_batch_row) as base:
                rows = pl.Sorted(op.node.name, ids.key, per_batch_row)
                return Split(0, rows, pl.Ids(ids.key, ids.limit)), Split(0, rows, pl.RowIndex(base))
            case pl.RowIndex(of), pl.Sorted() as rows if of == pl.Base(rows.per_batch_row):
                return Split(0, of, pl.Positions()), Split(0, of, pl.RowIndex(rows))
            case pl.Runs(lengths, _, 1) as runs, _ if original_order(runs) is not None:
                rows = pl.Length(pl.total(lengths))
                return Split(0, rows, pl.Positions()), Split(0, rows, pl.RunsInverse(runs))
            case pl.Labels() as labels, _ if op.get("stable"):
                return _sorted_labels(labels)
    raise op.refuse(
        "puts rows of different slices in one order",
        "sort expert ids that come from topk or argmax, with stable=True",
    )


def _sorted_labels(labels: pl.Labels) -> tuple[Split, Split]:
    """A stable sort of runs moves whole runs: in the order of their labels."""
    order = sorted(range(len(labels.values)), key=lambda j: labels.values[j])
    begin = pl.starts(labels.lengths)
    picked = tuple(labels.lengths[j] for j in order)
    offsets = tuple(
        pl.Form(begin[j].matrix - start.matrix, start.base)
        for j, start in zip(order, pl.starts(picked), strict=True)
    )
    rows = pl.Length(pl.total(labels.lengths))
    values = pl.Labels(picked, tuple(labels.values[j] for j in order))
    return Split(0, rows, values), Split(0, rows, pl.Runs(picked, offsets, 1))


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


@pl.register_rule(aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd)
def cross_entropy(op: Op) -> Decision:
    """A loss per row; one that is reduced joins its rows, so that it is summed as written."""
    if op["reduction"] != 0:
        raise op.refuse("reduces over rows", "reduction='none' keeps its rows apart")
    logits = _split(op)
    if logits.dim != 0 or len(op_shape(op)) < 2 or not isinstance(op.place(op["weight"]), Whole):
        raise op.refuse("is sliced along the classes")
    narrow: Narrow = {}
    match op.place(op["target"]):
        case Split(0, rows, meaning) if rows == logits.rows and not isinstance(
            meaning, pl.INDEX_MEANINGS
        ):
            pass
        case Whole():
            offset = -len(pl.shape_of(op["target"]))
            narrow = narrow_to(op, op["target"], offset, logits.rows, broadcasts=False)
        case _:
            raise op.refuse("has logits and targets of different rows")
    return Decision(Split(0, logits.rows), narrow)
