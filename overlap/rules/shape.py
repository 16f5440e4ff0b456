"""Views and shape changes: where the sliced dim goes.

A literal of a size argument is never taken for a batch size by its value. The sliced dim of a
result is the one with the same product of sizes before it; its size argument becomes -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from overlap import placement as pl
from overlap.placement import Counts, Decision, Many, Op, Scalar, Split, Whole

aten = torch.ops.aten


def carry(meaning: pl.Meaning) -> pl.Meaning:
    """Meanings that survive a change of shape of the other dims."""
    match meaning:
        case pl.Ids(key, limit):
            return pl.Ids(key, limit)
        case pl.OneHot():
            return None
        case other:
            return other


def reshaped_dim(op: Op, split: Split, before: Sequence[Any], after: Sequence[Any]) -> Split:
    """Where the sliced dim lands when a tensor of shape `before` is read as shape `after`."""
    prefix = pl.product(before[: split.dim])
    suffix = pl.product(before[split.dim + 1 :])
    for dim in range(len(after)):
        if not pl.same(pl.product(after[:dim]), prefix):
            continue
        after_suffix = pl.product(after[dim + 1 :])
        match split.rows:
            case pl.Base(per_batch_row):
                rows = pl.quotient(per_batch_row * suffix, after_suffix)
                if rows is not None and pl.same(after[dim], rows * op.batch):
                    return Split(dim, pl.Base(rows))
            case rows if pl.same(suffix, after_suffix):
                return Split(dim, rows)
            case _:
                pass
    raise op.refuse("folds rows of different slices into one dim")


@pl.register_rule(aten.view, aten.reshape, aten._unsafe_view, aten.unflatten, aten.flatten)
def reshape(op: Op) -> Decision:
    source = op["self"]
    place = op.place(source)
    if isinstance(place, Counts):
        return linear_on_counts(op)
    if not isinstance(place, Split):
        raise op.refuse("has no rule for this operand")
    if "dtype" in op.arguments:
        raise op.refuse("reinterprets the bytes of rows")
    result = reshaped_dim(op, place, pl.shape_of(source), op.shape)
    meaning = carry(place.meaning)
    if isinstance(meaning, pl.INDEX_MEANINGS) and result.rows != place.rows:
        raise op.refuse("regroups row numbers")
    return Decision(Split(result.dim, result.rows, meaning), replace=_sizes(op, place, result))


def _sizes(op: Op, before: Split, after: Split) -> dict[str, Any]:
    """Size arguments for a slice: -1 along the sliced dim, the others spelled out."""
    packet = op.node.target.overloadpacket
    if packet is aten.flatten:
        return {}
    name = "sizes" if packet is aten.unflatten else "shape" if "shape" in op.arguments else "size"
    first = op["dim"] % len(pl.shape_of(op["self"])) if packet is aten.unflatten else 0
    sizes = list(op[name])
    at = after.dim - first
    if not 0 <= at < len(sizes):
        return {}
    for i, size in enumerate(sizes):
        if size == -1 and i != at:
            sizes[i] = op.shape[first + i]
    sizes[at] = -1
    return {name: sizes}


@pl.register_rule(aten.expand, aten.expand_as, aten.broadcast_to)
def expand(op: Op) -> Decision:
    if op.node.target.overloadpacket is aten.expand_as:
        raise op.refuse("has no rule for operands that differ in rows")
    match op.place(op["self"]):
        case Split(dim, rows, meaning):
            added = len(op.shape) - len(pl.shape_of(op["self"]))
            sizes = list(op["size"])
            sizes[dim + added] = -1
            return Decision(Split(dim + added, rows, meaning), replace={"size": sizes})
        case Counts():
            return linear_on_counts(op)
        case _:
            raise op.refuse("has no rule for this operand")


def _single(op: Op) -> Split:
    place = op.place(op["self"])
    if not isinstance(place, Split):
        raise op.refuse("has no rule for a sum over slices")
    return place


@pl.register_rule(aten.transpose, aten.t, aten.permute, aten.swapaxes, aten.movedim, aten.mT)
def permute(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    num_dims = len(op.shape)
    match op.node.target.overloadpacket:
        case aten.permute:
            order = [d % num_dims for d in op["dims"]]
        case aten.t:
            order = list(range(num_dims))[::-1]
        case aten.transpose | aten.swapaxes:
            order = list(range(num_dims))
            a, b = (op.get(k, op.get(f"axis{k[-1]}")) % num_dims for k in ("dim0", "dim1"))
            order[a], order[b] = order[b], order[a]
        case _:
            raise op.refuse("has no rule")
    meaning = None if isinstance(split.meaning, pl.OneHot) else carry(split.meaning)
    return Decision(Split(order.index(split.dim), split.rows, meaning))


@pl.register_rule(aten.unsqueeze)
def unsqueeze(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    dim = op["dim"] % len(op.shape)
    return Decision(Split(split.dim + (dim <= split.dim), split.rows, carry(split.meaning)))


@pl.register_rule(aten.squeeze)
def squeeze(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    shape = pl.shape_of(op["self"])
    dims = op.get("dim")
    if dims is None:
        raise op.refuse("without a dim depends on the size of every dim", "name the dim")
    listed = [dims] if isinstance(dims, int) else list(dims)
    removed = [d % len(shape) for d in listed if shape[d % len(shape)] == 1]
    if split.dim in removed:
        raise op.refuse("removes the sliced dim")
    shift = sum(d < split.dim for d in removed)
    return Decision(Split(split.dim - shift, split.rows, carry(split.meaning)))


@pl.register_rule(aten.select)
def select(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    dim = op["dim"] % (len(op.shape) + 1)
    if dim == split.dim:
        raise op.refuse("takes one row of the batch")
    return Decision(Split(split.dim - (dim < split.dim), split.rows, carry(split.meaning)))


@pl.register_rule(aten.slice, aten.narrow)
def slice_(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    if op["dim"] % len(op.shape) == split.dim:
        if pl.same(op.shape[split.dim], pl.shape_of(op["self"])[split.dim]) and (
            op.node.target.overloadpacket is aten.slice and op["step"] == 1 and not op["start"]
        ):
            return Decision(split, replace={"end": None})
        raise op.refuse("takes a range of rows of the batch")
    return Decision(Split(split.dim, split.rows, carry(split.meaning)))


@pl.register_rule(aten.unbind)
def unbind(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    dim = op["dim"] % len(pl.shape_of(op["self"]))
    if dim == split.dim:
        raise op.refuse("takes the batch apart row by row")
    item = Split(split.dim - (dim < split.dim), split.rows, carry(split.meaning))
    return Decision(Many((item,) * _num_results(op)))


@pl.register_rule(aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split)
def split_(op: Op) -> Decision:
    split = _single(op)
    dim = op["dim"] % len(pl.shape_of(op["self"]))
    if dim != split.dim:
        item = Split(split.dim, split.rows, carry(split.meaning))
        return Decision(Many((item,) * _num_results(op)))
    sizes = op.get("split_sizes", op.get("split_size"))
    match split.rows:
        case pl.Received() as received if isinstance(sizes, list | tuple):
            return Decision(Many(tuple(_parts(op, received, split.dim, sizes))))
    raise op.refuse("cuts the batch at fixed rows")


def _parts(op: Op, received: pl.Received, dim: int, sizes: Sequence[Any]) -> list[Split]:
    """The received rows cut on borders of their runs, proven by equal forms."""
    parts: list[Split] = []
    segments = list(received.segments)
    for size in sizes:
        place = op.place(size)
        if not isinstance(place, Scalar):
            raise op.refuse("cuts received rows by a size that is no count of theirs")
        taken: list[pl.Segment] = []
        while segments and (not taken or pl.total([s.length for s in taken]) != place.form):
            taken.append(segments.pop(0))
        if not taken or pl.total([s.length for s in taken]) != place.form:
            raise op.refuse("cuts received rows inside a run of one expert")
        parts.append(Split(dim, pl.Received(received.dispatch, tuple(taken), received.back)))
    if segments:
        raise op.refuse("leaves received rows out")
    return parts


def _num_results(op: Op) -> int:
    from overlap import graph

    return len(graph.fake_value(op.node))


@pl.register_rule(aten.cat, aten.stack)
def cat(op: Op) -> Decision:
    tensors = list(op["tensors"])
    is_stack = op.node.target.overloadpacket is aten.stack
    dim = op["dim"] % len(op.shape)
    if all(isinstance(op.place(t), Counts | Whole) for t in tensors):
        raise op.refuse("has no rule for sums over slices")
    splits = [op.place(t) for t in tensors]
    first = next(s for s in splits if isinstance(s, Split))
    if dim == first.dim and not is_stack:
        return Decision(Split(dim, _concatenated(op, splits)))
    narrow: dict[fx.Node, tuple[int, Any]] = {}
    for tensor, place in zip(tensors, splits, strict=True):
        match place:
            case Split(d, rows) if d == first.dim and rows == first.rows:
                if isinstance(place.meaning, pl.INDEX_MEANINGS):
                    raise op.refuse("concatenates row numbers as data")
            case Whole() if isinstance(first.rows, pl.Base) and pl.same(
                pl.shape_of(tensor)[first.dim], first.rows.per_batch_row * op.batch
            ):
                narrow[tensor] = (first.dim, first.rows.per_batch_row)
            case _:
                raise op.refuse("concatenates values with different rows")
    at = first.dim + (1 if is_stack and dim <= first.dim else 0)
    return Decision(Split(at, first.rows), narrow)


def _concatenated(op: Op, parts: Sequence[pl.Placement]) -> pl.Rows:
    segments: list[pl.Segment] = []
    origin: tuple[str, pl.Sorted] | None = None
    for part in parts:
        match part:
            case Split(rows=pl.Received(dispatch, runs, back)) if (
                origin in (None, (dispatch, back)) and len(set(runs) & set(segments)) == 0
            ):
                origin = (dispatch, back)
                segments.extend(runs)
            case _:
                raise op.refuse("concatenates rows of different batches along the sliced dim")
    assert origin is not None
    return pl.Received(origin[0], tuple(segments), origin[1])


def linear_on_counts(op: Op) -> Decision:
    """A linear operator on counts: run it on every unit vector of the histogram."""
    place = op.place(op.operands[0])
    assert isinstance(place, Counts)
    if any(pl.is_sliced(op.place(node)) for node in op.operands[1:]):
        raise op.refuse("mixes counts with other sliced values")
    matrix = torch.from_numpy(place.form.matrix)

    def literal(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            raise op.refuse("reads a size that is no literal")
        return arg

    source = op.operands[0]
    args = fx.node.map_aggregate(op.node.args, lambda a: a if a is source else literal(a))

    def run(unit: int) -> Any:
        column = matrix[..., unit]
        return op.node.target(*fx.node.map_aggregate(args, lambda a: column if a is source else a))

    columns = [run(unit) for unit in range(matrix.shape[-1])]
    if isinstance(columns[0], list | tuple):
        forms = [torch.stack(list(items), -1) for items in zip(*columns, strict=True)]
        return Decision(Many(tuple(Counts(pl.Form(f.numpy(), place.form.base)) for f in forms)))
    return Decision(Counts(pl.Form(torch.stack(columns, -1).numpy(), place.form.base)))


@pl.register_rule(aten.view_as, aten.reshape_as)
def reshape_as(op: Op) -> Decision:
    """The shape of another value: its slices have the shape that the slices need."""
    match op.place(op["self"]), op.place(op["other"]):
        case Counts(form), _:
            shape = [int(size) for size in op.shape]
            return Decision(Counts(pl.Form(form.matrix.reshape(*shape, -1), form.base)))
        case Split() as place, Split() as other:
            result = reshaped_dim(op, place, pl.shape_of(op["self"]), op.shape)
            if (result.dim, result.rows) == (other.dim, other.rows):
                return Decision(Split(result.dim, result.rows, carry(place.meaning)))
    raise op.refuse("takes the shape of a value with other rows")
