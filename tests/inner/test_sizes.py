"""Sizes of a run in symbols of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv

from overlap.inner.sizes import RunSizes

s0, s1, u0, u1, u2 = sympy.symbols("s0 s1 u0 u1 u2", integer=True, nonnegative=True)
HALF = FloorDiv(s0, 2)
REST = s0 - HALF


def size(expr: Any) -> Any:
    return SimpleNamespace(node=SimpleNamespace(expr=expr))


def forms(*exprs: Any) -> list[str]:
    sizes = [size(expr) for expr in exprs]
    found = RunSizes.of([*sizes, 4])
    return [str(found.form(one)) for one in sizes]


@pytest.mark.parametrize("rows", [s0, HALF, REST, u1], ids=str)
def test_slices_look_alike(rows: Any) -> None:
    found = forms(rows, sympy.expand(16 * rows), sympy.expand(32 * rows * s1), s1)
    assert found == ["t0", "16*t0", "32*t0*t1", "t1"]


def test_a_sum_stays_the_sum_of_its_parts() -> None:
    assert forms(u1 + u0, u0, u1) == ["t0 + t1", "t0", "t1"]
    assert forms(s0, HALF, REST) == ["t0", "t1", "t0 - t1"]


def test_a_sum_without_its_parts_is_a_symbol() -> None:
    assert forms(3 * u0 + 3 * u1, u2) == ["3*t0", "t1"]


def test_evaluating_gives_the_size() -> None:
    rows, product = size(REST), size(sympy.expand(REST * s1 * 6))
    sizes = RunSizes.of([rows, size(s1), product])
    assert [sizes.evaluate(one, [5, 7]) for one in (rows, size(s1), product, 4)] == [5, 7, 210, 4]


def test_a_run_without_symbols() -> None:
    assert RunSizes.of([4, 2]).evaluate(4, []) == 4
