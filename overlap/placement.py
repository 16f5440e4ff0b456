"""What a value is on the slice axis, and what an operator makes of it.

The slice axis is virtual: a batch of B rows is cut into N slices, and every value of the forward
graph has a *placement* on that axis. The placement says how the value that one slice computes
relates to the value of the program as written:

    Whole             the slice sees the same value as the program
    Split(dim, rows)  the slice sees its own rows along `dim`; `rows` says which and in what order
    Partial           the program's value is the sum of what the slices see
    Counts(form)      a Partial of integers that are an exact linear form of a histogram
    Scalar(form)      one integer of such a form, read by the host
    Local             a slice's own scalar that may only reach assertions
    Many              a tuple of the above

Placements are proven, never guessed: an operator has a rule (`overlap.rules`), or it is refused.
A rule answers with a `Decision`; a `Refusal` says why there is none. Shapes alone prove nothing.

A routed exchange is proven exactly. The histogram of the ids is a symbolic vector c; everything
derived from it is an integer matrix times c, a `Form`; splits, segment permutations and the way
back are then equalities between integer matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from overlap import graph
from overlap.errors import ConfigError

# --- exact linear forms ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Form:
    """`matrix @ c`, an exact linear form of the integer vector c that `base` names.

    matrix: int64, the value's shape plus one last axis as long as c.
    base: the histogram ("hist:<key>") or the counts that an exchange received ("recv:<node>").
    """

    matrix: np.ndarray
    base: str

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Form)
            and self.base == other.base
            and np.array_equal(self.matrix, other.matrix)
        )

    def __hash__(self) -> int:
        return hash((self.base, self.matrix.tobytes()))

    def __add__(self, other: Form) -> Form:
        assert self.base == other.base, "forms of different histograms do not add"
        return Form(self.matrix + other.matrix, self.base)

    @property
    def rows(self) -> tuple[Form, ...]:
        """The elements of the value, in row-major order, each a scalar form."""
        flat = self.matrix.reshape(-1, self.matrix.shape[-1])
        return tuple(Form(row, self.base) for row in flat)

    @property
    def is_identity(self) -> bool:
        """Whether the value lists exactly the elements of c, in order."""
        flat = self.matrix.reshape(-1, self.matrix.shape[-1])
        return np.array_equal(flat, np.eye(flat.shape[1], dtype=np.int64))


def identity_form(size: int, base: str) -> Form:
    return Form(np.eye(size, dtype=np.int64), base)


def total(forms: Sequence[Form]) -> Form:
    result = forms[0]
    for form in forms[1:]:
        result = result + form
    return result


def starts(lengths: Sequence[Form]) -> tuple[Form, ...]:
    """Where each of consecutive runs begins: the exclusive running sum of their lengths."""
    result: list[Form] = []
    reached = Form(np.zeros_like(lengths[0].matrix), lengths[0].base)
    for length in lengths:
        result.append(reached)
        reached = reached + length
    return tuple(result)


# --- rows: which rows a slice holds, and in what order --------------------------------------------


@dataclasses.dataclass(frozen=True)
class Base:
    """`per_batch_row` rows for every batch row, in the order of the batch."""

    per_batch_row: sympy.Expr


@dataclasses.dataclass(frozen=True)
class Sorted:
    """The slice's rows, grouped in ascending order of a key of the row itself.

    order: the sort node that fixes the order among equal keys.
    key: identity of the ids that were sorted.
    per_batch_row: as in Base.
    """

    order: str
    key: str
    per_batch_row: sympy.Expr


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of received rows: how many, and the (source rank, local expert) they belong to."""

    length: Form
    label: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Received:
    """Rows that a dispatch brought, as runs in order; `dispatch` names the all-to-all and `back`
    the rows that its combine restores."""

    dispatch: str
    segments: tuple[Segment, ...]
    back: Sorted

    @property
    def length(self) -> Form:
        return total([segment.length for segment in self.segments])


@dataclasses.dataclass(frozen=True)
class Length:
    """As many rows as a form says, with no order of their own: fills, positions, run indices."""

    length: Form


Rows = Base | Sorted | Received | Length

# --- meaning: what the integers of a split value stand for ----------------------------------------


@dataclasses.dataclass(frozen=True)
class Ids:
    """Keys of the row itself, in [0, limit); `distinct` along the last dim within a row."""

    key: str
    limit: int
    distinct: bool = False


@dataclasses.dataclass(frozen=True)
class OneHot:
    """Along the last dim, 1 where the column is the row's id and 0 elsewhere."""

    ids: Ids


@dataclasses.dataclass(frozen=True)
class RowIndex:
    """Numbers of rows of `of`, counted inside the slice."""

    of: Base | Sorted


@dataclasses.dataclass(frozen=True)
class Fill:
    """The same constant everywhere."""

    value: float


@dataclasses.dataclass(frozen=True)
class Runs:
    """Constant on consecutive runs of rows, plus `positions` times the row's own number.

    Run j has `lengths[j]` rows, each holding `values[j] + positions * row`. With `positions == 1`
    the value takes whole runs of another tensor: run j reads the rows from
    `values[j] + (start of run j)`.
    """

    lengths: tuple[Form, ...]
    values: tuple[Form, ...]
    positions: int = 0

    @property
    def reads_from(self) -> tuple[Form, ...]:
        """The first row that each run reads, where the value is used as a row index."""
        return tuple(v + s for v, s in zip(self.values, starts(self.lengths), strict=True))


@dataclasses.dataclass(frozen=True)
class Labels:
    """Constant on consecutive runs: run j has `lengths[j]` rows, each holding the int `values[j]`."""

    lengths: tuple[Form, ...]
    values: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Positions:
    """The row's own number inside the slice: 0, 1, 2, ..."""


@dataclasses.dataclass(frozen=True)
class RunsInverse:
    """The row numbers that undo an index by `runs`."""

    runs: Runs


Meaning = Ids | OneHot | RowIndex | Fill | Runs | Labels | Positions | RunsInverse | None
INDEX_MEANINGS = (RowIndex, Runs, Labels, Positions, RunsInverse)
"""Meanings that hold inside one slice only: such a value may index rows, and nothing else."""

# --- placements -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Whole:
    """The same in every slice; `constant` is the value where it is a known small integer tensor."""

    constant: tuple[int, ...] | None = None
    fill: float | None = None


@dataclasses.dataclass(frozen=True)
class Split:
    dim: int
    rows: Rows
    meaning: Meaning = None


@dataclasses.dataclass(frozen=True)
class Partial:
    """The program's value is the sum over the slices."""


@dataclasses.dataclass(frozen=True)
class Counts:
    form: Form


@dataclasses.dataclass(frozen=True)
class Scalar:
    form: Form


@dataclasses.dataclass(frozen=True)
class Local:
    """A slice's own scalar without a form; `has_extent` where sizes of the whole batch went in."""

    has_extent: bool


@dataclasses.dataclass(frozen=True)
class Many:
    items: tuple[Placement, ...]


Placement = Whole | Split | Partial | Counts | Scalar | Local | Many
WHOLE = Whole()


def is_sliced(placement: Placement) -> bool:
    match placement:
        case Whole():
            return False
        case Many(items):
            return any(is_sliced(item) for item in items)
        case _:
            return True


def is_joinable(placement: Placement) -> bool:
    """Whether the program's value can be had from the slices' values: rows in batch order by cat,
    partial sums by adding. Rows in a slice's own order cannot be joined."""
    match placement:
        case Whole() | Partial() | Counts():
            return True
        case Split(_, Base(), meaning):
            return not isinstance(meaning, INDEX_MEANINGS)
        case Many(items):
            return all(is_joinable(item) for item in items)
        case _:
            return False


# --- decisions ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a rule says about one node.

    placement: of the result.
    narrow: whole operands that each slice takes its own rows of: operand to (dim, rows per batch
        row).
    replace: arguments by name that are rewritten for a slice (sizes along the split dim).
    once: emit the node a single time, on joined operands; its result is cut where a slice reads it.
    first_slice: emit the node a single time, on the first slice's operands, whose values it does
        not read (a size that every slice shares, a fill of a whole size).
    reassociates: the sum that slicing reassociates, for the report; "" for none.
    drop: leave the node out of the sliced program.
    """

    placement: Placement
    narrow: Mapping[fx.Node, tuple[int, sympy.Expr]] = dataclasses.field(default_factory=dict)
    replace: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    once: bool = False
    first_slice: bool = False
    reassociates: str = ""
    drop: bool = False


class Refusal(Exception):
    """Why an operator cannot be sliced, and what the user can do about it."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice


@dataclasses.dataclass(frozen=True)
class Op:
    """One operator of the forward graph with the placements of its operands.

    node: the call.
    arguments: by schema name, defaults filled in.
    placements: of every node before this one.
    batch: the batch size B as an expression.
    """

    node: fx.Node
    arguments: Mapping[str, Any]
    placements: Mapping[fx.Node, Placement]
    batch: sympy.Expr

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def place(self, operand: Any) -> Placement:
        """Placement of an argument; a literal is whole."""
        return self.placements[operand] if isinstance(operand, fx.Node) else WHOLE

    @property
    def operands(self) -> list[fx.Node]:
        return self.node.all_input_nodes

    @property
    def shape(self) -> tuple[sympy.Expr, ...]:
        return shape_of(self.node)

    @property
    def name(self) -> str:
        return operator_name(self.node)

    def refuse(self, reason: str, advice: str = "") -> Refusal:
        return Refusal(f"{self.name} {reason}", advice)


Rule = Callable[[Op], Decision]
_RULES: dict[Any, Rule] = {}


def register_rule(*operators: Any, override: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: the placement rule of one or more operators (OpOverloadPackets or functions).

    The rule gets an `Op` and returns a `Decision` or raises `Refusal`. Raises ConfigError where an
    operator has a rule already and `override` is not set.
    """

    def register(rule: Rule) -> Rule:
        for operator in operators:
            if operator in _RULES and not override:
                raise ConfigError(f"operator {operator} has a placement rule already")
            _RULES[operator] = rule
        return rule

    return register


def rule_for(node: fx.Node) -> Rule | None:
    packet = getattr(node.target, "overloadpacket", None)
    return _RULES.get(packet) or _RULES.get(node.target)


def registered_rules() -> Mapping[Any, Rule]:
    return dict(_RULES)


# --- shapes as expressions ------------------------------------------------------------------------


def expression(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def shape_of(node: fx.Node) -> tuple[sympy.Expr, ...]:
    value = graph.fake_value(node)
    if not isinstance(value, torch.Tensor):
        raise Refusal(f"{node.name} is not a tensor")
    return tuple(expression(size) for size in value.shape)


def same(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a == b or sympy.expand(a - b) == 0


def product(sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    return sympy.Mul(*sizes)


def quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """a / b where it is a polynomial with integer coefficients, else None."""
    if b == 0:
        return None
    ratio = sympy.cancel(a / b)
    numerator, denominator = sympy.fraction(ratio)
    return numerator if denominator == 1 else None


def operator_name(node: fx.Node) -> str:
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return getattr(target, "__name__", str(target))
    return str(packet).replace("torch.ops.", "")


def schema_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by schema name, with defaults; positional by index for plain functions."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(i): arg for i, arg in enumerate(node.args)} | dict(node.kwargs)
    arguments: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(node.args):
            arguments[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            arguments[argument.name] = node.kwargs[argument.name]
        else:
            arguments[argument.name] = argument.default_value
    return arguments
