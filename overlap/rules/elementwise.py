"""Operators that work element by element, and those that keep or replace every element.

Two sliced operands must hold the same rows along the same right-aligned dim. A whole operand with
that dim is narrowed to the slice's rows; one that broadcasts over it is used as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from overlap import graph
from overlap import placement as pl
from overlap.placement import Counts, Decision, Op, Partial, Split, Whole

aten = torch.ops.aten

UNARY = (
    aten.abs, aten.neg, aten.exp, aten.log, aten.log1p, aten.sqrt, aten.rsqrt, aten.reciprocal,
    aten.sin, aten.cos, aten.tanh, aten.sigmoid, aten.relu, aten.silu, aten.gelu, aten.softplus,
    aten.leaky_relu, aten.elu, aten.selu, aten.hardtanh, aten.mish, aten.square, aten.sign,
    aten.floor, aten.ceil, aten.round, aten.trunc, aten.erf, aten.isnan, aten.isinf, aten.isfinite,
    aten.logical_not, aten.bitwise_not, aten.nan_to_num, aten.relu6, aten.hardswish,
    aten.hardsigmoid, aten.log_sigmoid, aten.logit, aten.expm1, aten.log2, aten.exp2, aten.celu,
)  # fmt: skip
BINARY = (
    aten.pow, aten.maximum, aten.minimum, aten.remainder, aten.fmod, aten.ne, aten.lt, aten.le,
    aten.gt, aten.ge, aten.logical_and, aten.logical_or, aten.logical_xor, aten.bitwise_and,
    aten.bitwise_or, aten.bitwise_xor, aten.clamp, aten.clamp_min, aten.clamp_max,
    aten.masked_fill, aten.lerp, aten.addcmul, aten.addcdiv, aten.atan2, aten.logaddexp, aten.rsub,
    aten.xlogy,
)  # fmt: skip
CASTS = (
    aten.alias, aten.detach, aten.clone, aten.contiguous, aten.lift_fresh_copy, aten.to,
    aten._to_copy, aten.type_as, aten.positive,
)  # fmt: skip
LOSSES = (
    aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.kl_div,
    aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits,
)  # fmt: skip

Narrow = dict[fx.Node, tuple[int, sympy.Expr]]


@pl.register_rule(*UNARY, *BINARY)
def elementwise(op: Op) -> Decision:
    """Any number of operands, aligned from the right."""
    tensors = [n for n in op.operands if isinstance(graph.fake_value(n), torch.Tensor)]
    for node in op.operands:
        if node not in tensors and pl.is_sliced(op.place(node)):
            raise op.refuse(f"uses {node.name}, a size that differs between slices, as a value")
    split, narrow = align(op, tensors, len(op.shape))
    return Decision(split, narrow)


def align(
    op: Op, tensors: Sequence[fx.Node], num_dims: int, broadcasts: bool = True
) -> tuple[Split, Narrow]:
    """The split of a result of `num_dims` dims from `tensors`, and which whole ones to narrow."""
    splits: list[tuple[fx.Node, Split]] = []
    for node in tensors:
        match op.place(node):
            case Split(meaning=meaning) as split:
                if isinstance(meaning, pl.INDEX_MEANINGS):
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
    if not splits:
        raise op.refuse("has no rule for these operands")
    first, split = splits[0]
    offset = split.dim - len(pl.shape_of(first))
    rows = split.rows
    for node, other in splits[1:]:
        if other.dim - len(pl.shape_of(node)) != offset:
            raise op.refuse(f"combines {first.name} and {node.name}, sliced along different dims")
        rows = unify(op, rows, other.rows, first, node)
    narrow: Narrow = {}
    for node in tensors:
        if isinstance(op.place(node), Whole):
            narrow |= narrow_to(op, node, offset, rows, broadcasts)
    return Split(num_dims + offset, rows), narrow


def narrow_to(op: Op, node: fx.Node, offset: int, rows: pl.Rows, broadcasts: bool = True) -> Narrow:
    """What a slice takes of the whole value `node`, its dim `offset` (from the right) being that of
    `rows`: nothing where it broadcasts, else its own rows."""
    shape = pl.shape_of(node)
    dim = len(shape) + offset
    if broadcasts and (dim < 0 or shape[dim] == 1):
        return {}
    if (
        dim >= 0
        and isinstance(rows, pl.Base)
        and pl.same(shape[dim], rows.per_batch_row * op.batch)
    ):
        return {node: (dim, rows.per_batch_row)}
    raise op.refuse(f"aligns {node.name}, a whole value, with rows of another order")


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


@pl.register_rule(*CASTS)
def cast(op: Op) -> Decision:
    """Same value, perhaps in another dtype or layout; a second operand gives only those."""
    source = op.operands[0]
    place = op.place(source)
    for other in op.operands[1:]:
        op.place(other)
    was = graph.fake_value(source).dtype
    match place:
        case Split(dim, rows, meaning):
            return Decision(Split(dim, rows, _kept(op, meaning, was)))
        case Partial() if was.is_floating_point and not op.dtype.is_floating_point:
            raise op.refuse("rounds a sum over the slices")
        case Partial() | Counts():
            return Decision(place)
        case Whole():
            return Decision(place, first_slice=True)
    raise op.refuse("has no rule for this operand")


def _kept(op: Op, meaning: pl.Meaning, was: torch.dtype) -> pl.Meaning:
    """A meaning lives on in a dtype that holds all of its integers."""
    dtype = op.dtype
    match meaning:
        case pl.Ids(_, limit):
            return meaning if pl.holds(dtype, limit - 1) else None
        case pl.OneHot():
            return meaning if dtype == was or pl.holds(dtype, 127) else None
        case pl.Fill(value):
            return meaning if pl.kept_by(dtype, value) is not None else None
        case None:
            return None
        case _ if dtype in (torch.int32, torch.int64):
            return meaning
    raise op.refuse(f"casts row numbers to {dtype}, which does not hold them")


@pl.register_rule(aten.add, aten.sub)
def add(op: Op) -> Decision:
    """Sums over slices add up; so do exact counts, and the row numbers of runs."""
    place_a, place_b = op.place(op["self"]), op.place(op["other"])
    sign = 1 if op.packet is aten.add else -1
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
    """Run constants and row positions add up to run constants plus a multiple of the position."""
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
    """A sum over slices may be scaled by a whole value; `div` may also round row numbers down."""
    a, b = op["self"], op["other"]
    is_mul = op.packet is aten.mul
    rounding = op.get("rounding_mode")
    match op.place(a), op.place(b):
        case (Partial() | Counts(), Whole()) if rounding is None:
            return Decision(Partial())
        case Whole(), (Partial() | Counts()) if is_mul:
            return Decision(Partial())
        case Split(meaning=pl.RowIndex()), _ if rounding is not None:
            return floor_divide(op)
    return elementwise(op)


@pl.register_rule(aten.floor_divide)
def floor_divide(op: Op) -> Decision:
    """`order // k` maps the row of a (row, choice) pair to the row: row-major order makes it so."""
    divisor = op["other"]
    match op.place(op["self"]):
        case Split(dim, rows, pl.RowIndex(pl.Base(per_batch_row))) if isinstance(divisor, int):
            whole_rows = pl.quotient(per_batch_row, sympy.Integer(divisor))
            if whole_rows is None or divisor < 1:
                raise op.refuse(
                    f"divides row numbers by {divisor}, expected a divisor of {per_batch_row}, the "
                    "rows of one batch row"
                )
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
                constant == tuple(range(meaning.limit))
                and pl.shape_of(table) == (meaning.limit,)
                and pl.shape_of(ids)[-1] == 1
            ):
                return Decision(Split(split.dim, split.rows, pl.OneHot(meaning)), decision.narrow)
    return decision


@pl.register_rule(*LOSSES)
def loss(op: Op) -> Decision:
    """A loss per element; one that is reduced joins its rows, so that it is summed as written."""
    if op["reduction"] != 0:
        raise op.refuse("reduces over rows", "reduction='none' keeps its rows apart")
    return elementwise(op)


@pl.register_rule(aten.dropout)
def dropout(op: Op) -> Decision:
    decision = elementwise(op)
    if not op["train"] or op["p"] == 0:
        return decision
    note = "each slice draws its own random numbers, other ones than the program as written"
    return Decision(decision.placement, decision.narrow, note=note)


@pl.register_rule(
    aten.rand_like, aten.randn_like, aten.randint_like, aten.bernoulli, aten.rrelu,
    aten.native_dropout, aten.multinomial,
)  # fmt: skip
def random(op: Op) -> Decision:
    raise op.refuse("draws random numbers for the whole batch", "draw them before the layer")


@pl.register_rule(
    aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.fill, aten.zero
)
def fill_like(op: Op) -> Decision:
    """A value of the shape of another; what that holds is not read."""
    value: Any = op.get("fill_value", op.get("value"))
    if pl.is_sliced(op.place(value)):
        raise op.refuse(f"fills with {value}, which differs between slices")
    fill = pl.fill_of(op.node)
    match op.place(op["self"]):
        case Split(dim, rows):
            return Decision(Split(dim, rows, None if fill is None else pl.Fill(fill)))
        case _:
            return Decision(Whole(fill=fill), first_slice=True)
