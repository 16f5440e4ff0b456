"""Exact linear forms, what can be joined, and what a dtype holds."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
import torch

import overlap
from overlap import placement as pl
from overlap.errors import ConfigError

C = pl.identity_form(4, "hist:ids")


def test_forms_are_equal_by_value_and_base() -> None:
    first, second, *_ = C.rows
    assert first + second == pl.Form(np.array([1, 1, 0, 0]), "hist:ids")
    assert first != second
    assert first != pl.Form(first.matrix, "hist:other")
    assert hash(first) == hash(pl.Form(first.matrix.copy(), "hist:ids"))


def test_starts_are_running_sums() -> None:
    assert [start.matrix.tolist() for start in pl.starts(C.rows)] == [
        [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0],
    ]  # fmt: skip


def test_identity_is_recognised_in_any_shape() -> None:
    assert pl.Form(C.matrix.reshape(2, 2, 4), "hist:ids").is_identity
    assert not pl.Form(C.matrix[::-1].copy(), "hist:ids").is_identity


BASE = pl.Base(sympy.Integer(2))
SORTED = pl.Sorted("sort", "ids", sympy.Integer(2))


@pytest.mark.parametrize(
    ("placement", "joinable"),
    [
        (pl.WHOLE, True),
        (pl.Partial(), True),
        (pl.Counts(C), True),
        (pl.Split(0, BASE), True),
        (pl.Split(0, BASE, pl.Ids("ids", 4)), True),
        (pl.Split(0, BASE, pl.RowIndex(SORTED)), False),
        (pl.Split(0, SORTED), False),
        (pl.Split(0, pl.Picked("where")), False),
        (pl.Scalar(C.rows[0]), False),
        (pl.Many((pl.WHOLE, pl.Split(0, SORTED))), False),
    ],
)
def test_what_can_be_joined(placement: pl.Placement, joinable: bool) -> None:
    assert pl.is_joinable(placement) == joinable


@pytest.mark.parametrize(
    ("dtype", "largest", "answer"),
    [
        (torch.bool, 1, True),
        (torch.bool, 2, False),
        (torch.int8, 127, True),
        (torch.int8, 128, False),
        (torch.bfloat16, 256, True),
        (torch.bfloat16, 257, False),
        (torch.float32, pl.MAX_COUNT, True),
        (torch.complex64, 1, False),
    ],
)
def test_integers_that_a_dtype_holds(dtype: torch.dtype, largest: int, answer: bool) -> None:
    assert pl.holds(dtype, largest) == answer
    if answer and not dtype.is_complex:
        assert torch.tensor(largest).to(dtype).item() == largest


def test_sums_are_kept_in_fp32_or_better() -> None:
    assert pl.holds_sums(torch.float32) and pl.holds_sums(torch.int64)
    assert not pl.holds_sums(torch.bfloat16) and not pl.holds_sums(torch.bool)


def test_quotient_is_exact_or_none() -> None:
    s = sympy.Symbol("s")
    assert pl.quotient(6 * s, sympy.Integer(3)) == 2 * s
    assert pl.quotient(s, sympy.Integer(2)) is None
    assert pl.quotient(s, sympy.Integer(0)) is None


def test_a_rule_is_registered_once() -> None:
    with pytest.raises(ConfigError, match=r"aten\.linear has a placement rule already"):
        overlap.register_rule(torch.ops.aten.linear)(lambda op: None)
