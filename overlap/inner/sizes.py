"""The sizes of a run in symbols of its own, so that runs of other slices and layers look alike.

    sizes of the graph    s0//2, 16*(s0//2), u3, u3 + u4, u4
    sizes of the run      t0,    16*t0,      t1, t1 + t2, t2

Each size is a polynomial with whole coefficients in the run's symbols. What is no polynomial in
smaller sizes of the run becomes a symbol; relations to sizes that the run does not have are
forgotten, which leaves fewer facts to rely on and never a wrong one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
from torch.utils._sympy.functions import Max


@dataclasses.dataclass(frozen=True)
class RunSizes:
    """symbols: the run's own, `t0, t1, ...`, and what each stands for in the graph.
    forms: by size of the graph, the same in those."""

    symbols: Mapping[Any, Any]
    forms: Mapping[Any, Any]

    @classmethod
    def of(cls, sizes: Iterable[Any]) -> RunSizes:
        """From all sizes of a run, in the order in which they are met."""
        found = dict.fromkeys(map(expression, sizes))
        naming = _Naming({})
        for size in sorted(found, key=lambda size: size.count_ops()):  # stable: met first, first
            naming.name(size)
        forms = {size: naming.form(size) for size in found}
        used = dict.fromkeys(
            symbol
            for form in forms.values()
            for symbol in sorted(form.free_symbols, key=lambda symbol: symbol.name)
        )
        names = {old: _symbol(i) for i, old in enumerate(used)}
        meanings = {symbol: meaning for meaning, symbol in naming.symbols.items()}
        return cls(
            {new: meanings[old] for old, new in names.items()},
            {size: form.xreplace(names) for size, form in forms.items()},
        )

    def form(self, size: Any) -> Any:
        """A size, an int, a SymInt or an expression, in the run's symbols."""
        found = expression(size)
        return found if found.is_Integer else self.forms[found]

    def terms(self, size: Any) -> list[tuple[int, tuple[int, ...]]]:
        """The same as terms: each a coefficient and the power of every symbol."""
        form = self.form(size)
        if not self.symbols:
            return [(int(form), ())]
        poly = sympy.Poly(form, *self.symbols)
        return [(int(factor), powers) for powers, factor in poly.terms()]

    def evaluate(self, size: Any, values: Sequence[Any]) -> Any:
        """A size, given values of the run's symbols."""
        total: Any = 0
        for factor, powers in self.terms(size):
            term: Any = factor
            for value, power in zip(values, powers, strict=True):
                for _ in range(power):
                    term = term * value
            total = total + term
        return total


def expression(size: Any) -> Any:
    """An int or a SymInt as an expression in the symbols of its graph."""
    if isinstance(size, sympy.Basic):
        return size
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def stride_expression(stride: Any) -> Any:
    """The same for a stride. A dense one of a size that may be 0 is written with max(1, size);
    with the size itself it differs for tensors without elements only, whose strides say nothing."""
    return expression(stride).replace(
        lambda part: isinstance(part, Max) and len(part.args) == 2 and sympy.S.One in part.args,
        lambda part: next(arg for arg in part.args if arg != 1),
    )


def _symbol(index: int) -> sympy.Symbol:
    return sympy.Symbol(f"t{index}", integer=True, nonnegative=True)


@dataclasses.dataclass
class _Naming:
    """symbols: by the expression of the graph that each stands for."""

    symbols: dict[Any, sympy.Symbol]

    def name(self, size: Any) -> None:
        if self._known(size) is None:
            self.symbols[_factored(size)[1]] = _symbol(len(self.symbols))

    def form(self, size: Any) -> Any:
        """`size`, which has been named, in the symbols that there are."""
        form = self._known(size)
        assert form is not None
        return form

    def _known(self, size: Any) -> Any:
        """`size` in the symbols that there are, None if it needs another."""
        if size.is_Integer:
            return size
        factor, rest = _factored(size)
        if rest in self.symbols:
            return factor * self.symbols[rest]
        for whole in dict.fromkeys((rest, sympy.factor(rest))):
            if whole.is_Add or whole.is_Mul:
                parts = [self._known(part) for part in whole.args]
                if None not in parts:
                    return sympy.expand(factor * whole.func(*parts))
        return None


def _factored(size: Any) -> tuple[Any, Any]:
    """A whole factor and the rest of a size."""
    size = sympy.expand(size)
    factor, rest = size.as_content_primitive()
    return (factor, rest) if factor.is_Integer else (sympy.Integer(1), size)
