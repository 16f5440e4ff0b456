"""Operators that work element by element, or row by row on dims that are not sliced.

Two sliced operands must hold the same rows along the same right-aligned dim. A whole operand with
that dim is narrowed to the slice's rows; one that broadcasts over it is used as it is.
"""

from __future__ import annotations

import torch
from torch import fx

from overlap import placement as pl
from overlap.placement import Counts, Decision, Op, Partial, Split, Whole

aten = torch.ops.aten

UNARY = (
    aten.abs, aten.neg, aten.exp, aten.log, aten.log1p, aten.sqrt, aten.rsqrt, aten.reciprocal,
    aten.sin, aten.cos, aten.tanh, aten.sigmoid, aten.relu, aten.silu, aten.gelu, aten.softplus,
    aten.leaky_relu, aten.elu, aten.hardtanh, aten.mish, aten.square, aten.sign, aten.floor,
    aten.ceil, aten.round, aten.erf, aten.isnan, aten.isfinite, aten.logical_not, aten.bitwise_not,
    aten.nan_to_num, aten.relu6, aten.hardswish, aten.hardsigmoid, aten.log_sigmoid,
    aten.expm1, aten.log2, aten.exp2,
)  # fmt: skip
BINARY = (
    aten.pow, aten.maximum, aten.minimum, aten.remainder, aten.fmod, aten.ne, aten.lt, aten.le,
    aten.gt, aten.ge, aten.logical_and, aten.logical_or, aten.bitwise_and, aten.bitwise_or,
    aten.where, aten.clamp, aten.clamp_min, aten.clamp_max, aten.masked_fill, aten.lerp,
    aten.addcmul, aten.addcdiv, aten.atan2, aten.logaddexp, aten.rsub,
)  # fmt: skip
IDENTITY = (
    aten.alias, aten.detach, aten.clone, aten.contiguous, aten.lift_fresh_copy, aten.to,
    aten._to_copy, aten.type_as,
)  # fmt: skip


@pl.register_rule(*UNARY, *BINARY)
def elementwise(op: Op) -> Decision:
    """Any number of operands, aligned from the right."""
    tensors = [node for node in op.operands if isinstance(_fake(node), torch.Tensor)]
    for node in op.operands:
        if node not in tensors and pl.is_sliced(op.place(node)):
            raise op.refuse(f"uses {node.name}, a size that differs between slices, as a value")
    split, narrow = align(op, tensors, len(op.shape))
    return Decision(split, narrow)


def align(
    op: Op, tensors: list[fx.Node], num_dims: int, allow_meaning: bool = False
) -> tuple[Split, dict[fx.Node, tuple[int, object]]]:
    """The split of a broadcast result of `tensors`, and which whole operands to narrow."""
    splits: list[tuple[fx.Node, Split]] = []
    for node in tensors:
        match op.place(node):
            case Split() as split:
                if isinstance(split.meaning, pl.INDEX_MEANINGS) and not allow_meaning:
                    raise op.refuse(
                        f"uses {node.name} as data, but its row numbers hold inside one slice only"
                    )
                splits.append((node, split))
            case Whole():
                pass
            case Partial() | Counts():
                raise op.refuse(f"is not linear in {node.name}, a sum over the slices")
            case other:
                raise op.refuse(f"has no rule for {node.name}, a {type(other).__name__}")
    first, split = splits[0]
    offset = split.dim - len(pl.shape_of(first))
    rows = split.rows
    for node, other in splits[1:]:
        if other.dim - len(pl.shape_of(node)) != offset:
            raise op.refuse(f"combines {first.name} and {node.name}, sliced along different dims")
        rows = unify(op, rows, other.rows, first, node)
    narrow: dict[fx.Node, tuple[int, object]] = {}
    for node in tensors:
        if not isinstance(op.place(node), Whole):
            continue
        shape = pl.shape_of(node)
        dim = offset + len(shape)
        if dim < 0 or shape[dim] == 1:
            continue
        if not isinstance(rows, pl.Base) or not pl.same(shape[dim], rows.per_batch_row * op.batch):
            raise op.refuse(f"aligns {node.name}, a whole value, with rows of another order")
        narrow[node] = (dim, rows.per_batch_row)
    return Split(num_dims + offset, rows), narrow


def unify(op: Op, a: pl.Rows, b: pl.Rows, first: fx.Node, second: fx.Node) -> pl.Rows:
    """The rows of a value that takes element i from rows `a` and from rows `b`."""
    if a == b:
        return a
    match a, b:
        case (pl.Length(length), pl.Received() as received) | (
            pl.Received() as received,
            pl.Length(length),
        ) if received.length == length:
            return received
    raise op.refuse(f"combines {first.name} and {second.name}, whose rows are in different orders")


def _fake(node: fx.Node) -> object:
    from overlap import graph

    return graph.fake_value(node)


@pl.register_rule(*IDENTITY)
def identity(op: Op) -> Decision:
    """Same value, perhaps another dtype or layout; meanings survive, exact integers too."""
    source = op.operands[0]
    if len(op.operands) > 1:
        return elementwise(op)
    return Decision(op.place(source))


@pl.register_rule(aten.add, aten.sub)
def add(op: Op) -> Decision:
    a, b = op["self"], op["other"]
    place_a, place_b = op.place(a), op.place(b)
    sign = 1 if op.node.target.overloadpacket is aten.add else -1
    if op.get("alpha", 1) != 1:
        return elementwise(op)
    match place_a, place_b:
        case Counts(x), Counts(y) if x.base == y.base and x.matrix.shape == y.matrix.shape:
            return Decision(Counts(pl.Form(x.matrix + sign * y.matrix, x.base)))
        case (Partial() | Counts(), Partial() | Counts()):
            return Decision(Partial())
        case Split(meaning=pl.Runs() | pl.Positions()), Split(meaning=pl.Runs() | pl.Positions()):
            return _add_runs(op, place_a, place_b, sign)
    return elementwise(op)


def _add_runs(op: Op, a: Split, b: Split, sign: int) -> Decision:
    """Sums of run constants and row positions stay run constants plus a multiple of the position."""
    rows = unify(op, a.rows, b.rows, *op.operands[:2])
    match a.meaning, b.meaning:
        case pl.Runs() as x, pl.Runs() as y if x.lengths == y.lengths:
            values = tuple(
                pl.Form(u.matrix + sign * v.matrix, u.base)
                for u, v in zip(x.values, y.values, strict=True)
            )
            runs = pl.Runs(x.lengths, values, x.positions + sign * y.positions)
        case pl.Runs() as x, pl.Positions():
            runs = pl.Runs(x.lengths, x.values, x.positions + sign)
        case pl.Positions(), pl.Runs() as y:
            values = tuple(pl.Form(sign * v.matrix, v.base) for v in y.values)
            runs = pl.Runs(y.lengths, values, 1 + sign * y.positions)
        case _:
            raise op.refuse("combines row positions of different runs")
    return Decision(Split(a.dim, rows, runs))


@pl.register_rule(aten.mul, aten.div)
def scale(op: Op) -> Decision:
    """A sum over slices may be scaled by a whole value."""
    a, b = op["self"], op["other"]
    match op.place(a), op.place(b):
        case (Partial() | Counts(), Whole()) if op.get("rounding_mode") is None:
            return Decision(Partial())
        case Whole(), (Partial() | Counts()) if op.node.target.overloadpacket is aten.mul:
            return Decision(Partial())
    return elementwise(op)


@pl.register_rule(aten.floor_divide)
def floor_divide(op: Op) -> Decision:
    """`order // k` maps the row of a (row, choice) pair to the row: row-major order makes it so."""
    source, divisor = op["self"], op["other"]
    match op.place(source):
        case Split(dim, rows, pl.RowIndex(pl.Base(per_batch_row))) if isinstance(divisor, int):
            whole_rows = pl.quotient(per_batch_row, pl.sympy.Integer(divisor))
            if whole_rows is None:
                raise op.refuse(f"divides row numbers by {divisor}, which mixes batch rows")
            return Decision(Split(dim, rows, pl.RowIndex(pl.Base(whole_rows))))
    return elementwise(op)


@pl.register_rule(aten.eq)
def equal(op: Op) -> Decision:
    """`ids[..., None] == arange(E)` is the one-hot form of the ids."""
    decision = elementwise(op)
    split = decision.placement
    assert isinstance(split, Split)
    for ids, table in ((op["self"], op["other"]), (op["other"], op["self"])):
        match op.place(ids), op.place(table):
            case Split(meaning=pl.Ids() as meaning), Whole(constant=constant) if (
                constant == tuple(range(meaning.limit)) and pl.shape_of(ids)[-1] == 1
            ):
                return Decision(Split(split.dim, split.rows, pl.OneHot(meaning)), decision.narrow)
    return decision


@pl.register_rule(aten.dropout)
def dropout(op: Op) -> Decision:
    decision = elementwise(op)
    if not op["train"] or op["p"] == 0:
        return decision
    return Decision(
        decision.placement,
        reassociates=f"{op.node.name}: each slice draws its own random numbers",
    )


@pl.register_rule(aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like)
def fill_like(op: Op) -> Decision:
    match op.place(op["self"]):
        case Split(dim, rows):
            packet = op.node.target.overloadpacket
            value = {aten.ones_like: 1.0, aten.full_like: op.get("fill_value")}.get(packet, 0.0)
            meaning = pl.Fill(value) if isinstance(value, int | float) else None
            return Decision(Split(dim, rows, meaning))
        case _:
            return Decision(pl.WHOLE, first_slice=True)


@pl.register_rule(aten.rand_like, aten.randn_like, aten.bernoulli, aten.rrelu, aten.native_dropout)
def random(op: Op) -> Decision:
    raise op.refuse("draws random numbers", "draw them before the sliced region")
