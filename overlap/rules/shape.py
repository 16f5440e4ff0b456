"""Views and shape changes: where the sliced dim goes.

A literal of a size argument is never taken for a batch size by its value. The sliced dim of a
result is the one with the same product of sizes before it; its size argument becomes -1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from overlap import graph
from overlap import placement as pl
from overlap.placement import Counts, Decision, Many, Op, Partial, Scalar, Split, Whole
from overlap.rules.elementwise import Narrow, align, narrow_to

aten = torch.ops.aten


def _single(op: Op) -> Split:
    place = op.place(op["self"])
    if not isinstance(place, Split):
        raise op.refuse(f"has no rule for {op['self']}, a sum over the slices")
    return place


def _regrouped(meaning: pl.Meaning) -> pl.Meaning:
    """Meanings that outlive another grouping of all elements. A one-hot form has a last dim, and
    ids that were distinct along theirs need not be along another."""
    match meaning:
        case pl.Ids(key, limit):
            return pl.Ids(key, limit)
        case pl.OneHot():
            return None
        case other:
            return other


def _part(op: Op, meaning: pl.Meaning) -> pl.Meaning:
    """Meanings that outlive the loss or repetition of elements: ids are then another key's."""
    match meaning:
        case pl.Ids(_, limit):
            return pl.Ids(op.node.name, limit)
        case other:
            return _regrouped(other)


# --- views ----------------------------------------------------------------------------------------


def reshaped(op: Op, split: Split, before: Sequence[Any], after: Sequence[Any]) -> Split:
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
                    return _with_rows(op, split, dim, pl.Base(rows))
            case rows if pl.same(suffix, after_suffix):
                return _with_rows(op, split, dim, rows)
            case _:
                pass
    raise op.refuse(
        f"reads {list(before)} as {list(after)}, which folds rows of different slices into one dim"
    )


def _with_rows(op: Op, split: Split, dim: int, rows: pl.Rows) -> Split:
    if isinstance(split.meaning, pl.INDEX_MEANINGS) and rows != split.rows:
        raise op.refuse("regroups row numbers")
    return Split(dim, rows, _regrouped(split.meaning))


@pl.register_rule(aten.view, aten.reshape, aten._unsafe_view, aten.unflatten, aten.flatten)
def reshape(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    if "dtype" in op.arguments:
        raise op.refuse("reinterprets the bytes of rows")
    result = reshaped(op, _single(op), pl.shape_of(op["self"]), op.shape)
    return Decision(result, replace=_sizes(op, result))


def _sizes(op: Op, after: Split) -> dict[str, Any]:
    """Size arguments for a slice: -1 along the sliced dim, the others spelled out."""
    packet = op.packet
    if packet is aten.flatten:
        return {}
    name = "sizes" if packet is aten.unflatten else "shape" if "shape" in op.arguments else "size"
    first = op["dim"] % len(pl.shape_of(op["self"])) if packet is aten.unflatten else 0
    sizes = list(op[name])
    at = after.dim - first
    if not 0 <= at < len(sizes):
        return {}
    for i, size in enumerate(sizes):
        if isinstance(size, int) and size == -1 and i != at:
            sizes[i] = op.shape[first + i]
    sizes[at] = -1
    return {name: sizes}


@pl.register_rule(aten.view_as, aten.reshape_as)
def reshape_as(op: Op) -> Decision:
    """The shape of another value: its slices have the shape that the slices need."""
    match op.place(op["self"]), op.place(op["other"]):
        case Counts(form), (Counts() | Whole()):
            shape = [int(size) for size in op.shape]
            return Decision(Counts(pl.Form(form.matrix.reshape(*shape, -1), form.base)))
        case Split() as place, Split(dim, rows):
            result = reshaped(op, place, pl.shape_of(op["self"]), op.shape)
            if (result.dim, result.rows) == (dim, rows):
                return Decision(result)
    raise op.refuse(f"takes the shape of {op['other']}, which has other rows")


@pl.register_rule(aten.view_as_real, aten.view_as_complex)
def view_pairs(op: Op) -> Decision:
    """A last dim of pairs, as complex numbers; or back."""
    split = _single(op)
    if op.packet is aten.view_as_complex and split.dim == len(op.shape):
        raise op.refuse("pairs up rows of different slices")
    return Decision(Split(split.dim, split.rows))


@pl.register_rule(aten.expand, aten.broadcast_to)
def expand(op: Op) -> Decision:
    match op.place(op["self"]):
        case Split(dim, rows, meaning):
            at = dim + len(op.shape) - len(pl.shape_of(op["self"]))
            sizes = list(op["size"])
            sizes[at] = -1
            return Decision(Split(at, rows, _part(op, meaning)), replace={"size": sizes})
        case Counts():
            return linear_on_counts(op)
        case _:
            raise op.refuse("is given a size that differs between slices")


@pl.register_rule(aten.expand_as)
def expand_as(op: Op) -> Decision:
    source, other = op["self"], op["other"]
    match op.place(source), op.place(other):
        case Split(dim, rows, meaning), Split(other_dim, other_rows) if (
            rows == other_rows
            and dim - len(pl.shape_of(source)) == other_dim - len(pl.shape_of(other))
        ):
            return Decision(Split(other_dim, rows, _part(op, meaning)))
    split, narrow = align(op, [source, other], len(op.shape))
    return Decision(split, narrow)


# --- the order of dims ----------------------------------------------------------------------------


@pl.register_rule(
    aten.transpose, aten.t, aten.permute, aten.swapaxes, aten.swapdims, aten.movedim, aten.moveaxis,
    aten.mT, aten.numpy_T, aten.adjoint,
)  # fmt: skip
def permute(op: Op) -> Decision:
    """Where a dim goes is read off an empty tensor whose sizes all differ."""
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    probe = torch.empty([2 + dim for dim in range(len(op.shape))], device="meta")
    call: Any = op.node.target
    moved = call(probe, *op.node.args[1:], **op.node.kwargs)
    return Decision(Split(moved.shape.index(2 + split.dim), split.rows, _regrouped(split.meaning)))


@pl.register_rule(aten.unsqueeze)
def unsqueeze(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    dim = op["dim"] % len(op.shape)
    return Decision(Split(split.dim + (dim <= split.dim), split.rows, _regrouped(split.meaning)))


@pl.register_rule(aten.squeeze)
def squeeze(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    shape = pl.shape_of(op["self"])
    dims = op.get("dim")
    if dims is None:
        raise op.refuse("without a dim removes a batch of one row", "name the dim")
    listed = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)}
    if split.dim in listed:
        raise op.refuse(f"removes dim {split.dim} from a slice of one row", "name other dims")
    shift = sum(d < split.dim and shape[d] == 1 for d in listed)
    return Decision(Split(split.dim - shift, split.rows, _regrouped(split.meaning)))


# --- parts ----------------------------------------------------------------------------------------


@pl.register_rule(aten.select)
def select(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    dim = op["dim"] % (len(op.shape) + 1)
    if dim == split.dim:
        raise op.refuse(f"takes one row of dim {dim}, along which the batch is sliced")
    return Decision(Split(split.dim - (dim < split.dim), split.rows, _part(op, split.meaning)))


@pl.register_rule(aten.slice, aten.narrow)
def slice_(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    dim = op["dim"] % len(op.shape)
    if dim != split.dim:
        return Decision(Split(split.dim, split.rows, _part(op, split.meaning)))
    takes_all = pl.same(op.shape[dim], pl.shape_of(op["self"])[dim])
    if takes_all and op.get("step") == 1 and op["start"] in (None, 0):
        return Decision(split, replace={"end": None})
    raise op.refuse(f"takes a range of dim {dim}, along which the batch is sliced")


@pl.register_rule(aten.tril, aten.triu)
def triangle(op: Op) -> Decision:
    split = _single(op)
    if split.dim >= len(op.shape) - 2 or isinstance(split.meaning, pl.INDEX_MEANINGS):
        raise op.refuse(f"depends on the position along dim {split.dim}, which is sliced")
    return Decision(Split(split.dim, split.rows))


@pl.register_rule(aten.pad, aten.constant_pad_nd)
def pad(op: Op) -> Decision:
    """Pads come in pairs, for the last dim first."""
    if isinstance(op.place(op["self"]), Counts):
        if op.get("mode", "constant") != "constant" or op.get("value"):
            raise op.refuse("pads counts with something else than zeros")
        return linear_on_counts(op)
    split = _single(op)
    padded = {len(op.shape) - 1 - i // 2 for i, size in enumerate(op["pad"]) if size != 0}
    if split.dim in padded or isinstance(split.meaning, pl.INDEX_MEANINGS):
        raise op.refuse(f"pads dim {split.dim}, along which the batch is sliced")
    return Decision(Split(split.dim, split.rows))


@pl.register_rule(aten.repeat, aten.tile)
def repeat(op: Op) -> Decision:
    split = _single(op)
    times = list(op.get("repeats", op.get("dims")))
    added = len(op.shape) - len(pl.shape_of(op["self"]))
    times = [1] * (len(op.shape) - len(times)) + times
    at = split.dim + added
    if isinstance(times[at], fx.Node) or times[at] != 1:
        raise op.refuse(f"repeats dim {split.dim}, along which the batch is sliced")
    return Decision(Split(at, split.rows, _part(op, split.meaning)))


@pl.register_rule(aten.unbind)
def unbind(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    dim = op["dim"] % len(pl.shape_of(op["self"]))
    if dim == split.dim:
        raise op.refuse(f"takes dim {dim} apart, along which the batch is sliced")
    return _parts_alike(op, split, split.dim - (dim < split.dim))


@pl.register_rule(
    aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unsafe_split,
    aten.unsafe_chunk, aten.unsafe_split_with_sizes,
)  # fmt: skip
def split_(op: Op) -> Decision:
    if isinstance(op.place(op["self"]), Counts):
        return linear_on_counts(op)
    split = _single(op)
    if op["dim"] % len(pl.shape_of(op["self"])) != split.dim:
        return _parts_alike(op, split, split.dim)
    sizes = op.get("split_sizes", op.get("split_size"))
    match split.rows:
        case pl.Received() as received if isinstance(sizes, list | tuple):
            return Decision(Many(tuple(_parts(op, received, split.dim, sizes))))
    raise op.refuse(f"cuts dim {split.dim}, along which the batch is sliced, at fixed rows")


def _parts_alike(op: Op, split: Split, dim: int) -> Decision:
    """Parts of every row; those of ids are keys of their own."""
    meaning = split.meaning
    if isinstance(meaning, pl.Ids):
        num = len(graph.fake_value(op.node))
        keys = (pl.Ids(f"{op.node.name}.{i}", meaning.limit) for i in range(num))
        return Decision(Many(tuple(Split(dim, split.rows, key) for key in keys)))
    item = Split(dim, split.rows, _regrouped(meaning))
    return Decision(Many((item,) * len(graph.fake_value(op.node))))


def _parts(op: Op, received: pl.Received, dim: int, sizes: Sequence[Any]) -> Iterator[Split]:
    """The received rows cut on borders of their runs, proven by equal forms."""
    segments = list(received.segments)
    for size in sizes:
        place = op.place(size)
        if not isinstance(place, Scalar):
            raise op.refuse(f"cuts received rows by {size}, which is no count of theirs")
        taken: list[pl.Segment] = []
        while segments and (not taken or pl.total([s.length for s in taken]) != place.form):
            taken.append(segments.pop(0))
        if not taken or pl.total([s.length for s in taken]) != place.form:
            raise op.refuse(f"cuts received rows by {size}, inside the run of one expert")
        yield Split(dim, pl.Received(received.dispatch, tuple(taken), received.back))
    if segments:
        raise op.refuse("leaves received rows out")


# --- cat ------------------------------------------------------------------------------------------


@pl.register_rule(aten.cat, aten.concat, aten.stack)
def cat(op: Op) -> Decision:
    tensors: list[fx.Node] = list(op["tensors"])
    places = [op.place(tensor) for tensor in tensors]
    is_stack = op.packet is aten.stack
    dim = op["dim"] % len(op.shape)
    first = next((p for p in places if isinstance(p, Split)), None)
    if first is None:
        return _cat_counts(op, tensors, dim, is_stack)
    if dim == first.dim and not is_stack:
        return Decision(Split(dim, _concatenated(op, places)))
    offset = first.dim - len(pl.shape_of(tensors[places.index(first)]))
    narrow: Narrow = {}
    for tensor, place in zip(tensors, places, strict=True):
        match place:
            case Split(d, rows, meaning) if d == first.dim and rows == first.rows:
                if isinstance(meaning, pl.INDEX_MEANINGS):
                    raise op.refuse("concatenates row numbers as data")
            case Whole():
                narrow |= narrow_to(op, tensor, offset, first.rows, broadcasts=False)
            case _:
                raise op.refuse(f"concatenates {tensor}, which has other rows")
    at = first.dim + (1 if is_stack and dim <= first.dim else 0)
    return Decision(Split(at, first.rows), narrow)


def _concatenated(op: Op, parts: Sequence[pl.Placement]) -> pl.Received:
    """Received rows put together again from parts of one dispatch."""
    segments: list[pl.Segment] = []
    origin: tuple[str, pl.Sorted] | None = None
    for part in parts:
        match part:
            case Split(rows=pl.Received(dispatch, runs, back), meaning=None) if origin in (
                None,
                (dispatch, back),
            ) and not set(runs) & set(segments):
                origin = (dispatch, back)
                segments.extend(runs)
            case _:
                raise op.refuse("concatenates along the dim along which the batch is sliced")
    assert origin is not None
    return pl.Received(origin[0], tuple(segments), origin[1])


def _cat_counts(op: Op, tensors: Sequence[fx.Node], dim: int, is_stack: bool) -> Decision:
    """Counts beside counts or zeros, as in `cat([zeros(1), counts.cumsum(0)])`."""
    form = next((p.form for t in tensors if isinstance(p := op.place(t), Counts)), None)
    if form is None:
        if all(isinstance(op.place(t), Partial) for t in tensors):
            return Decision(Partial())
        raise op.refuse("concatenates sums over the slices with something else")
    matrices: list[np.ndarray] = []
    for tensor in tensors:
        match op.place(tensor):
            case Counts(other) if other.base == form.base:
                matrices.append(other.matrix)
            case Whole(fill=0.0):
                shape = [int(size) for size in pl.shape_of(tensor)]
                matrices.append(np.zeros((*shape, form.matrix.shape[-1]), dtype=np.int64))
            case _:
                raise op.refuse("concatenates counts with something else")
    joined = np.stack(matrices, dim) if is_stack else np.concatenate(matrices, dim)
    return Decision(Counts(pl.Form(joined, form.base)))


# --- counts ---------------------------------------------------------------------------------------


def linear_on_counts(op: Op) -> Decision:
    """A linear operator on counts: run it on every unit vector of the histogram."""
    source = op.operands[0]
    place = op.place(source)
    assert isinstance(place, Counts)
    if len(op.operands) > 1:
        raise op.refuse("reads a size that is no literal")
    matrix = torch.from_numpy(place.form.matrix)

    call: Any = op.node.target

    def run(unit: int) -> Any:
        column = matrix[..., unit]
        args, kwargs = fx.map_arg((op.node.args, dict(op.node.kwargs)), lambda _: column)
        return call(*args, **kwargs)

    columns = [run(unit) for unit in range(matrix.shape[-1])]
    if isinstance(columns[0], list | tuple):
        items = (_form_of(results, place.form.base) for results in zip(*columns, strict=True))
        return Decision(Many(tuple(map(Counts, items))))
    return Decision(Counts(_form_of(columns, place.form.base)))


def _form_of(columns: Sequence[torch.Tensor], base: str) -> pl.Form:
    return pl.Form(torch.stack(list(columns), -1).to(torch.int64).numpy(), base)
