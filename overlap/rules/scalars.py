"""Sizes, host reads, assertions and creation: everything whose operands are numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch

from overlap import placement as pl
from overlap.placement import Counts, Decision, Local, Op, Scalar, Split, Whole

aten = torch.ops.aten


@pl.register_rule(aten.item, aten._local_scalar_dense)
def item(op: Op) -> Decision:
    match op.place(op["self"]):
        case Counts(form) if form.matrix.ndim == 1:
            return Decision(Scalar(form))
    raise op.refuse("reads a value of the batch on the host")


@pl.register_rule(aten.sym_size)
def size(op: Op) -> Decision:
    source = op["self"]
    match op.place(source):
        case Split(dim, rows) if op["dim"] % len(pl.shape_of(source)) == dim:
            match rows:
                case pl.Received() | pl.Length():
                    return Decision(Scalar(rows.length))
                case pl.Picked():
                    return Decision(Local(False))
                case _:
                    return Decision(pl.WHOLE, once=True)
        case _:
            return Decision(pl.WHOLE, first_slice=True)


@pl.register_rule(torch.sym_sum, operator.add, operator.sub, operator.mul)
def linear_scalar(op: Op) -> Decision:
    args: list[Any] = list(op.node.args)
    if op.node.target is torch.sym_sum:
        args = list(args[0])
    forms = [place.form for arg in args if isinstance(place := op.place(arg), Scalar)]
    if len(forms) == len(args) and len({form.base for form in forms}) == 1:
        match op.node.target:
            case torch.sym_sum | operator.add:
                return Decision(Scalar(pl.total(forms)))
            case operator.sub:
                return Decision(Scalar(pl.Form(forms[0].matrix - forms[1].matrix, forms[0].base)))
    return _local(op)


@pl.register_rule(
    operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne,
    operator.floordiv, operator.mod, operator.neg, operator.and_, operator.or_, operator.not_,
    torch.sym_not, torch.sym_max, torch.sym_min, torch.sym_ite,
)  # fmt: skip
def other_scalar(op: Op) -> Decision:
    return _local(op)


def _local(op: Op) -> Decision:
    # A literal other than 0 may be a size of the whole batch that Dynamo burned in.
    literals = [arg for arg in op.node.args if isinstance(arg, int)]
    has_extent = any(literal != 0 for literal in literals)
    for node in op.operands:
        match op.place(node):
            case Scalar():
                pass
            case Local(extent):
                has_extent |= extent
            case Whole():
                has_extent = True
            case _:
                raise op.refuse("computes a size from a value of the batch")
    return Decision(Local(has_extent), drop=has_extent)


@pl.register_rule(aten._assert_scalar, aten.sym_constrain_range, aten.sym_constrain_range_for_size)
def assertion(op: Op) -> Decision:
    """Checks on a slice's own sizes hold for every slice; one that names a size of the whole batch
    is about the un-sliced program and goes."""
    match op.place(op.operands[0]):
        case Local(has_extent):
            return Decision(Local(False), drop=has_extent)
        case Scalar():
            return Decision(Local(False), drop=(op.get("min") or 0) > 0)
        case _:
            raise op.refuse("checks a value of the batch on the host")


@pl.register_rule(aten._assert_tensor_metadata)
def metadata_assertion(op: Op) -> Decision:
    """About the un-sliced program's own shapes."""
    op.place(op["a"])
    return Decision(Local(False), drop=True)


@pl.register_rule(aten.arange)
def arange(op: Op) -> Decision:
    if op.get("start", 0) != 0 or op.get("step", 1) != 1:
        raise op.refuse("of a slice's size starts elsewhere than at 0")
    match op.place(op["end"]):
        case Scalar(form):
            return Decision(Split(0, pl.Length(form), pl.Positions()))
    raise op.refuse("has a size that is computed from a value of the batch")


@pl.register_rule(
    aten.zeros, aten.ones, aten.empty, aten.full, aten.new_zeros, aten.new_ones, aten.new_empty,
    aten.new_full,
)  # fmt: skip
def create(op: Op) -> Decision:
    op.place(op.get("self"))  # it gives the dtype and device only
    if pl.is_sliced(op.place(op.get("fill_value"))):
        raise op.refuse(f"fills with {op['fill_value']}, which differs between slices")
    fill = pl.fill_of(op.node)
    sliced = [i for i, size in enumerate(op["size"]) if pl.is_sliced(op.place(size))]
    if not sliced:
        return Decision(pl.Whole(fill=fill), first_slice=True)
    match op.place(op["size"][sliced[0]]):
        case Scalar(form) if len(sliced) == 1:
            meaning = None if fill is None else pl.Fill(fill)
            return Decision(Split(sliced[0], pl.Length(form), meaning))
    raise op.refuse("has a size that is computed from a value of the batch")
