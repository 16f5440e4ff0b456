"""Matrix products, convolutions, attention, norms and lookups. The sliced dim passes where it is a
dim of rows or a batch dim; contracting it, or normalising over it, mixes slices and is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import fx

from overlap import placement as pl
from overlap.placement import Counts, Decision, Op, Split, Whole
from overlap.rules.elementwise import Narrow, narrow_to

aten = torch.ops.aten


def _data(op: Op, name: str) -> Split | Whole:
    match op.place(op[name]):
        case Split(meaning=meaning) as split if not isinstance(meaning, pl.INDEX_MEANINGS):
            return split
        case Whole() as whole:
            return whole
        case _:
            raise op.refuse(f"has no rule for its operand {name}, {op[name]}")


def _all_whole(op: Op, *names: str) -> bool:
    return all(isinstance(op.place(op.get(name)), Whole) for name in names)


def _contracts(op: Op) -> pl.Refusal:
    return op.refuse("contracts the dim along which the batch is sliced")


@pl.register_rule(aten.linear)
def linear(op: Op) -> Decision:
    x = _data(op, "input")
    if not isinstance(x, Split) or not _all_whole(op, "weight", "bias"):
        raise op.refuse("multiplies by a weight that differs between slices")
    if x.dim == len(pl.shape_of(op["input"])) - 1:
        raise _contracts(op)
    return Decision(Split(x.dim, x.rows))


@pl.register_rule(aten.matmul, aten.mm, aten.bmm, aten.mv, aten.dot)
def matmul(op: Op) -> Decision:
    names = ("self", next(n for n in ("other", "mat2", "vec", "tensor") if n in op.arguments))
    a, b = (_data(op, name) for name in names)
    node_a, node_b = (op[name] for name in names)
    num_a, num_b = len(pl.shape_of(node_a)), len(pl.shape_of(node_b))
    at_a = a.dim - num_a if isinstance(a, Split) else 0
    at_b = b.dim - num_b if isinstance(b, Split) else 0
    if at_a == -1 or at_b == (-1 if num_b == 1 else -2):
        raise _contracts(op)
    if min(num_a, num_b) == 1:
        return _times_vector(op, a, b, num_a, num_b)
    num_dims = len(op.shape)
    match a, b:
        case Split(rows=rows), Whole():
            narrow = narrow_to(op, node_b, at_a, rows) if at_a < -2 else {}
            return Decision(Split(num_dims + at_a, rows), narrow)
        case Whole(), Split(rows=rows):
            narrow = narrow_to(op, node_a, at_b, rows) if at_b < -2 else {}
            return Decision(Split(num_dims + at_b, rows), narrow)
        case Split(rows=rows), Split(rows=rows_b) if rows == rows_b and at_a == at_b < -2:
            return Decision(Split(num_dims + at_a, rows))
    raise op.refuse("multiplies rows of different slices")


def _times_vector(op: Op, a: Split | Whole, b: Split | Whole, num_a: int, num_b: int) -> Decision:
    """One operand is a whole vector that the other's last (or next to last) dim meets."""
    match a, b:
        case Split(dim, rows), Whole() if num_b == 1:
            return Decision(Split(dim, rows))
        case Whole(), Split(dim, rows) if num_a == 1:
            at = dim if dim < num_b - 2 else dim - 1
            return Decision(Split(at, rows))
    raise op.refuse("multiplies rows of different slices")


@pl.register_rule(aten.addmm)
def addmm(op: Op) -> Decision:
    a, b, bias = _data(op, "mat1"), _data(op, "mat2"), _data(op, "self")
    match a, b, bias:
        case Split(0, rows), Whole(), Whole() if len(pl.shape_of(op["self"])) == 1:
            return Decision(Split(0, rows))
        case Split(1), Whole(), _:
            raise _contracts(op)
    raise op.refuse("multiplies or adds rows of different slices")


@pl.register_rule(aten.einsum)
def einsum(op: Op) -> Decision:
    """The letter of the sliced dim is one, is kept, and is cut in every operand that has it."""
    equation = op["equation"].replace(" ", "")
    if "->" not in equation or "." in equation:
        raise op.refuse("has no rule for an equation without '->' or with '...'", "spell it out")
    inputs, output = equation.split("->")
    pairs = list(zip(inputs.split(","), op["tensors"], strict=True))
    letter, rows = _sliced_letter(op, pairs)
    if letter not in output:
        raise _contracts(op)
    if any(letters.count(letter) > 1 for letters in (output, *inputs.split(","))):
        raise op.refuse("takes a diagonal of the dim along which the batch is sliced")
    narrow: Narrow = {}
    for letters, tensor in pairs:
        if isinstance(op.place(tensor), Whole) and letter in letters:
            narrow |= narrow_to(op, tensor, letters.index(letter) - len(letters), rows)
    return Decision(Split(output.index(letter), rows), narrow)


def _sliced_letter(op: Op, pairs: list[tuple[str, fx.Node]]) -> tuple[str, pl.Rows]:
    found: dict[tuple[str, pl.Rows], None] = {}
    for letters, tensor in pairs:
        match op.place(tensor):
            case Split(dim, rows, meaning) if not isinstance(meaning, pl.INDEX_MEANINGS):
                found[letters[dim], rows] = None
            case Whole():
                pass
            case _:
                raise op.refuse(f"has no rule for its operand {tensor.name}")
    if len(found) != 1:
        raise op.refuse("multiplies rows of different slices")
    return next(iter(found))


@pl.register_rule(aten._grouped_mm)
def grouped_mm(op: Op) -> Decision:
    """Groups of received rows, each group a run of whole segments, times its own matrix."""
    place, weight, offsets = op.place(op["self"]), op.place(op["mat2"]), op.place(op["offs"])
    match place, weight, offsets:
        case Split(0, pl.Received() as received), Whole(), Counts(form) if (
            len(pl.shape_of(op["mat2"])) == 3 and op["bias"] is None
        ):
            ends = list(form.rows)
        case _:
            raise op.refuse("has no rule for these operands", "group received rows by their counts")
    groups = pl.Groups(tuple(_groups(op, received, ends)), {"mat2": 0, "offs": 0})
    return Decision(Split(0, received), groups=groups)


def _groups(op: Op, received: pl.Received, ends: Sequence[pl.Form]) -> Iterator[pl.Group]:
    """The rows up to each end, which have to be whole runs."""
    segments = list(received.segments)
    reached = pl.Form(np.zeros_like(ends[0].matrix), ends[0].base)
    for end in ends:
        start, experts = reached, set[int]()
        while segments and reached != end:
            segment = segments.pop(0)
            reached = reached + segment.length
            experts.add(segment.label[1])
        if reached != end:
            raise op.refuse("cuts received rows inside a run of one expert")
        yield pl.Group(pl.Form(end.matrix - start.matrix, end.base), frozenset(experts))
    if segments:
        raise op.refuse("leaves received rows out")


@pl.register_rule(aten.scaled_dot_product_attention)
def attention(op: Op) -> Decision:
    q, k, v = (_data(op, name) for name in ("query", "key", "value"))
    num_dims = len(op.shape)
    if not (isinstance(q, Split) and isinstance(k, Split) and isinstance(v, Split)) or not (
        q.rows == k.rows == v.rows and q.dim == k.dim == v.dim
    ):
        raise op.refuse("attends across rows of different slices")
    if q.dim >= num_dims - 2:
        raise op.refuse(
            f"attends along dim {q.dim}, along which the batch is sliced",
            "give every document its own batch row",
        )
    if op["enable_gqa"] and q.dim == num_dims - 3:
        raise op.refuse("with enable_gqa is sliced along the heads")
    if op["dropout_p"] != 0:
        raise op.refuse("draws random numbers for the whole batch", "set dropout_p=0")
    mask = op["attn_mask"]
    narrow: Narrow = {}
    match op.place(mask):
        case Whole() if isinstance(mask, fx.Node):
            narrow = narrow_to(op, mask, q.dim - num_dims, q.rows)
        case Split(dim, rows, meaning) if (
            dim - len(pl.shape_of(mask)) != q.dim - num_dims
            or rows != q.rows
            or isinstance(meaning, pl.INDEX_MEANINGS)
        ):
            raise op.refuse(f"has a mask, {mask.name}, that is sliced along another dim")
        case Whole() | Split():
            pass
        case _:
            raise op.refuse(f"has no rule for its mask {mask}")
    return Decision(Split(q.dim, q.rows), narrow)


@pl.register_rule(aten.rms_norm, aten.layer_norm)
def norm(op: Op) -> Decision:
    x = _data(op, "input")
    if not isinstance(x, Split) or not _all_whole(op, "weight", "bias"):
        raise op.refuse("has a weight that differs between slices")
    if x.dim >= len(op.shape) - len(op["normalized_shape"]):
        raise op.refuse(f"normalises over dim {x.dim}, along which the batch is sliced")
    return Decision(Split(x.dim, x.rows))


@pl.register_rule(aten.batch_norm)
def batch_norm(op: Op) -> Decision:
    """With running statistics it scales each channel; with those of the batch it mixes rows."""
    if op["training"] or op["running_mean"] is None:
        raise op.refuse("takes statistics over the whole batch", "use a norm over features")
    x = _data(op, "input")
    if not isinstance(x, Split) or x.dim == 1:
        raise op.refuse("is sliced along its channels")
    if not _all_whole(op, "weight", "bias", "running_mean", "running_var"):
        raise op.refuse("has statistics that differ between slices")
    return Decision(Split(x.dim, x.rows))


_BATCHED_RANK = {
    aten.conv1d: 3, aten.conv2d: 4, aten.conv3d: 5, aten.avg_pool1d: 3, aten.avg_pool2d: 4,
    aten.max_pool1d: 3, aten.max_pool2d: 4, aten.adaptive_avg_pool1d: 3,
    aten.adaptive_avg_pool2d: 4,
}  # fmt: skip


@pl.register_rule(*_BATCHED_RANK, aten.group_norm)
def per_sample(op: Op) -> Decision:
    """Dim 0 is a batch whose rows never meet."""
    name = "input" if "input" in op.arguments else "self"
    x = _data(op, name)
    rank = _BATCHED_RANK.get(op.packet)
    if not isinstance(x, Split) or x.dim != 0 or rank not in (None, len(pl.shape_of(op[name]))):
        raise op.refuse("is sliced along a dim that it mixes")
    if not _all_whole(op, "weight", "bias"):
        raise op.refuse("has a weight that differs between slices")
    return Decision(Split(0, x.rows))


@pl.register_rule(aten.embedding)
def embedding(op: Op) -> Decision:
    indices = _data(op, "indices")
    if not isinstance(indices, Split) or not _all_whole(op, "weight"):
        raise op.refuse("looks up in a table that differs between slices")
    if op["scale_grad_by_freq"]:
        raise op.refuse("scales gradients by how often a row occurs in the whole batch")
    return Decision(Split(indices.dim, indices.rows))


@pl.register_rule(aten.one_hot)
def one_hot(op: Op) -> Decision:
    match op.place(op["self"]):
        case Split(dim, rows, pl.Ids() as ids) if op["num_classes"] == ids.limit:
            return Decision(Split(dim, rows, pl.OneHot(ids)))
        case Split(dim, rows, meaning) if op["num_classes"] > 0 and not isinstance(
            meaning, pl.INDEX_MEANINGS
        ):
            return Decision(Split(dim, rows))
    raise op.refuse("has as many classes as the largest id of the batch", "pass num_classes")
