"""Matrix products, attention, norms and lookups. The sliced dim passes where it is a dim of rows or
a batch dim; contracting it would mix slices and is refused."""

from __future__ import annotations

import torch

from overlap import placement as pl
from overlap.placement import Counts, Decision, Op, Split, Whole

aten = torch.ops.aten


def _data(op: Op, name: str) -> Split | Whole:
    match op.place(op[name]):
        case Split(meaning=meaning) as split if not isinstance(meaning, pl.INDEX_MEANINGS):
            return split
        case Whole() as whole:
            return whole
        case _:
            raise op.refuse(f"has no rule for its operand {name}")


@pl.register_rule(aten.linear)
def linear(op: Op) -> Decision:
    x, weight = _data(op, "input"), _data(op, "weight")
    bias = op.place(op["bias"])
    if not (isinstance(x, Split) and isinstance(weight, Whole) and isinstance(bias, Whole)):
        raise op.refuse("multiplies by a weight that differs between slices")
    if x.dim == len(op.shape) - 1:
        raise op.refuse("contracts the sliced dim")
    return Decision(Split(x.dim, x.rows), reassociates=_weight_gradient(op))


def _weight_gradient(op: Op) -> str:
    return f"{op.node.name}: weight gradient, a sum over sliced rows"


@pl.register_rule(aten.matmul, aten.mm, aten.bmm)
def matmul(op: Op) -> Decision:
    names = ("self", "other" if "other" in op.arguments else "mat2")
    a, b = (_data(op, name) for name in names)
    node_a, node_b = (op[name] for name in names)
    shape_a, shape_b = pl.shape_of(node_a), pl.shape_of(node_b)
    if min(len(shape_a), len(shape_b)) < 2:
        raise op.refuse("has no rule for a vector operand")
    num_dims = len(op.shape)
    match a, b:
        case Split(dim, rows), Whole():
            at = dim - len(shape_a)
            if at == -1:
                raise op.refuse("contracts the sliced dim")
            narrow = _narrow_batch(op, node_b, shape_b, at, rows) if at < -2 else {}
            note = _weight_gradient(op) if not narrow else ""
            return Decision(Split(num_dims + at, rows), narrow, reassociates=note)
        case Whole(), Split(dim, rows):
            at = dim - len(shape_b)
            if at == -2:
                raise op.refuse("contracts the sliced dim")
            narrow = _narrow_batch(op, node_a, shape_a, at, rows) if at < -2 else {}
            return Decision(Split(num_dims + at, rows), narrow)
        case Split(dim_a, rows), Split(dim_b, rows_b) if rows == rows_b:
            at = dim_a - len(shape_a)
            if at == dim_b - len(shape_b) and at < -2:
                return Decision(Split(num_dims + at, rows))
    raise op.refuse("mixes rows of different slices")


def _narrow_batch(op, node, shape, at, rows):
    dim = len(shape) + at
    if dim < 0 or shape[dim] == 1:
        return {}
    if isinstance(rows, pl.Base) and pl.same(shape[dim], rows.per_batch_row * op.batch):
        return {node: (dim, rows.per_batch_row)}
    raise op.refuse(f"aligns {node.name}, a whole value, with rows of another order")


@pl.register_rule(aten.addmm)
def addmm(op: Op) -> Decision:
    a, b, bias = _data(op, "mat1"), _data(op, "mat2"), _data(op, "self")
    match a, b, bias:
        case Split(0, rows), Whole(), Whole() if len(pl.shape_of(op["self"])) == 1:
            return Decision(Split(0, rows), reassociates=_weight_gradient(op))
    raise op.refuse("mixes rows of different slices")


@pl.register_rule(aten.einsum)
def einsum(op: Op) -> Decision:
    equation = op["equation"].replace(" ", "")
    if "->" not in equation or "." in equation:
        raise op.refuse("has no rule for an equation without '->' or with '...'")
    inputs, output = equation.split("->")
    letter: str | None = None
    rows: pl.Rows | None = None
    for letters, tensor in zip(inputs.split(","), op["tensors"], strict=True):
        match op.place(tensor):
            case Split(dim, r, meaning) if not isinstance(meaning, pl.INDEX_MEANINGS):
                if letter not in (None, letters[dim]) or rows not in (None, r):
                    raise op.refuse("mixes rows of different slices")
                letter, rows = letters[dim], r
            case Whole():
                pass
            case _:
                raise op.refuse("has no rule for its operands")
    if letter is None or rows is None or letter not in output:
        raise op.refuse("contracts the sliced dim")
    narrow = {}
    for letters, tensor in zip(inputs.split(","), op["tensors"], strict=True):
        if isinstance(op.place(tensor), Whole) and letter in letters:
            at = letters.index(letter) - len(letters)
            narrow |= _narrow_batch(op, tensor, pl.shape_of(tensor), at, rows)
    return Decision(Split(output.index(letter), rows), narrow, reassociates=_weight_gradient(op))


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
            raise op.refuse("has no rule for these operands")
    reached: list[pl.Form] = []
    for segment in received.segments:
        reached.append(segment.length if not reached else reached[-1] + segment.length)
    if any(end not in reached for end in ends) or ends[-1] != reached[-1]:
        raise op.refuse("cuts received rows inside a run of one expert")
    return Decision(Split(0, received), reassociates=_weight_gradient(op))


@pl.register_rule(aten.scaled_dot_product_attention)
def attention(op: Op) -> Decision:
    q, k, v = (_data(op, name) for name in ("query", "key", "value"))
    if not (isinstance(q, Split) and q == k == v and q.dim < len(op.shape) - 2):
        raise op.refuse("attends across rows of different slices")
    if op["enable_gqa"] and q.dim == len(op.shape) - 3:
        raise op.refuse("with grouped heads is sliced along the heads")
    if op["dropout_p"] != 0:
        raise op.refuse("draws random numbers", "set dropout_p=0")
    mask = op["attn_mask"]
    narrow = {}
    match op.place(mask):
        case Whole() if isinstance(mask, torch.fx.Node):
            at = q.dim - len(op.shape)
            narrow = _narrow_batch(op, mask, pl.shape_of(mask), at, q.rows)
        case Split(dim, rows) if (
            dim - len(pl.shape_of(mask)) != q.dim - len(op.shape) or rows != q.rows
        ):
            raise op.refuse("has a mask that is sliced along another dim")
        case Whole() | Split():
            pass
        case _:
            raise op.refuse("has no rule for its mask")
    return Decision(Split(q.dim, q.rows), narrow)


@pl.register_rule(aten.rms_norm, aten.layer_norm, aten._fused_rms_norm)
def norm(op: Op) -> Decision:
    x = _data(op, "input")
    if not isinstance(x, Split) or x.dim >= len(op.shape) - len(op["normalized_shape"]):
        raise op.refuse("normalises over the sliced dim")
    if not all(isinstance(op.place(op.get(n)), Whole) for n in ("weight", "bias")):
        raise op.refuse("has a weight that differs between slices")
    return Decision(
        Split(x.dim, x.rows), reassociates=f"{op.node.name}: weight gradient over sliced rows"
    )


@pl.register_rule(aten.embedding)
def embedding(op: Op) -> Decision:
    indices = _data(op, "indices")
    if not isinstance(indices, Split) or not isinstance(op.place(op["weight"]), Whole):
        raise op.refuse("looks up in a table that differs between slices")
    if op["scale_grad_by_freq"]:
        raise op.refuse("scales gradients by how often a row occurs in the batch")
    return Decision(
        Split(indices.dim, indices.rows),
        reassociates=f"{op.node.name}: gradient of the table, a sum over sliced rows",
    )


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
