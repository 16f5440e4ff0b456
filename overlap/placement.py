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
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from overlap import collectives, graph
from overlap.errors import ConfigError, unknown_name
from overlap.graph import schema_arguments

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


@dataclasses.dataclass(frozen=True)
class Picked:
    """The slice's rows for which a mask holds, as many as there are; `mask` names the node that
    numbered them."""

    mask: str


Rows = Base | Sorted | Received | Length | Picked

# --- meaning: what the integers of a split value stand for ----------------------------------------


@dataclasses.dataclass(frozen=True)
class Ids:
    """Keys of the row itself, in [0, limit); `distinct` along the last dim within a row."""

    key: str
    limit: int
    distinct: bool = False


@dataclasses.dataclass(frozen=True)
class OneHot:
    """Summed over all dims but the last, it counts how often each id occurs."""

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
    """Constant on consecutive runs: run j is `lengths[j]` rows, each holding `values[j]`."""

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
class Group:
    """Rows that one entry of a grouped operator's arguments is for.

    length: how many.
    experts: the local experts that they are routed to.
    """

    length: Form
    experts: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Groups:
    """An operator that treats groups of rows apart.

    groups: in order.
    arguments: those with one entry per group: name to dim.
    """

    groups: tuple[Group, ...]
    arguments: Mapping[str, int]


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
    reassociates: the sum over rows of all slices that the node is, for the report; "" for none.
    summed: whole operands whose gradient becomes a sum over slices; found by the prover.
    note: how else the sliced program differs, told to the user; "" for nothing.
    drop: leave the node out of the sliced program.
    groups: of an operator that treats groups of rows apart; a slice of experts passes its own only.
    """

    placement: Placement
    narrow: Mapping[fx.Node, tuple[int, sympy.Expr]] = dataclasses.field(default_factory=dict)
    replace: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    once: bool = False
    first_slice: bool = False
    reassociates: str = ""
    summed: tuple[fx.Node, ...] = ()
    note: str = ""
    drop: bool = False
    groups: Groups | None = None


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
    seen: operands whose placement a rule asked for; a sliced one that it left out is refused.
    acts_as: the operator whose rule this call is held to, None for its own.
    """

    node: fx.Node
    arguments: Mapping[str, Any]
    placements: Mapping[fx.Node, Placement]
    batch: sympy.Expr
    seen: set[fx.Node] = dataclasses.field(default_factory=set[fx.Node], compare=False)
    acts_as: Any = None

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def place(self, operand: Any) -> Placement:
        """Placement of an argument; a literal is whole."""
        if not isinstance(operand, fx.Node):
            return WHOLE
        self.seen.add(operand)
        return self.placements[operand]

    @property
    def packet(self) -> Any:
        """The operator, whatever the overload; the function itself for what is none."""
        return self.acts_as or graph.packet_of(self.node)

    @property
    def operands(self) -> list[fx.Node]:
        return self.node.all_input_nodes

    @property
    def shape(self) -> tuple[sympy.Expr, ...]:
        return shape_of(self.node)

    @property
    def name(self) -> str:
        return operator_name(self.node)

    @property
    def call(self) -> Callable[..., Any]:
        """What the node calls."""
        assert callable(self.node.target), f"{self.node} calls no function"
        return self.node.target

    @property
    def dtype(self) -> torch.dtype:
        """Of the result, a tensor."""
        return graph.fake_value(self.node).dtype

    def refuse(self, reason: str, advice: str = "") -> Refusal:
        """The refusal of this operator; `reason` continues a sentence that starts with its name."""
        return Refusal(f"{self.name} {reason}", advice)


Rule = Callable[[Op], Decision]
_RULES: dict[Any, Rule] = {}


def register_rule(*operators: Any, override: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: the placement rule of one or more operators (OpOverloadPackets or functions).

    The rule gets an `Op` and returns a `Decision` or raises `Refusal`. It answers for the backward
    too, where the operator has one of its own: that runs once per slice, on the slice's gradients,
    and what it returns for a whole operand is added up. `like` makes rules from those there are.

    Raises ConfigError where an operator has a rule already and `override` is not set.
    """

    known = [graph.operator(operator) for operator in operators]

    def register(rule: Rule) -> Rule:
        for operator in known:
            if operator in _RULES and not override:
                raise ConfigError(f"operator {operator} has a placement rule already")
            _RULES[operator] = rule
        return rule

    return register


def like(operator: Any, **names: str) -> Rule:
    """The rule of an operator that treats rows as another one does, forward and backward.

    operator: the other one, an OpOverloadPacket with a rule.
    names: its arguments, each by the new operator's name for it; the rest have their defaults.

        overlap.register_rule(torch.ops.mine.swiglu)(like(torch.ops.aten.mul, self="a", other="b"))
    """
    if operator not in _RULES:
        raise ConfigError(f"operator {operator} has no placement rule to be like")
    [schema, *_] = graph.schemas(operator)
    defaults = {a.name: a.default_value for a in schema.arguments}
    for name in names:
        if name not in defaults:
            raise unknown_name("argument", name, defaults, place=f"of {operator}")

    def rule(op: Op) -> Decision:
        given = {theirs: op.arguments[own] for theirs, own in names.items()}
        decision = _RULES[operator](
            dataclasses.replace(op, arguments=defaults | given, acts_as=operator)
        )
        groups = decision.groups
        if groups:
            arguments = {names[name]: dim for name, dim in groups.arguments.items()}
            groups = dataclasses.replace(groups, arguments=arguments)
        replaced = {names[name]: value for name, value in decision.replace.items()}
        return dataclasses.replace(decision, replace=replaced, groups=groups)

    return rule


def rule_for(node: fx.Node) -> Rule | None:
    """The node's own, or that of the functional collective that does the same."""
    packet, like = graph.packet_of(node), collectives.functional_like(node)
    return _RULES.get(packet) or _RULES.get(node.target) or _RULES.get(like)


def registered_rules() -> Mapping[Any, Rule]:
    return dict(_RULES)


# --- what a placement says about the value itself -------------------------------------------------

MAX_COUNT = 2**24
"""Rows of one slice that counts are trusted for; a dtype that holds no such number is refused."""


def holds(dtype: torch.dtype, largest: int) -> bool:
    """Whether a dtype holds every integer from 0 to `largest` exactly."""
    if dtype.is_complex:
        return False
    if dtype.is_floating_point:
        return largest <= 2 / torch.finfo(dtype).eps
    return largest <= (1 if dtype is torch.bool else torch.iinfo(dtype).max)


def holds_sums(dtype: torch.dtype) -> bool:
    """Whether partial sums in a dtype may be added later: fp32 or better, or wide integers."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.finfo(dtype).bits >= 32
    return dtype in (torch.int32, torch.int64)


def contradiction(
    placement: Placement, value: Any, batch: sympy.Expr, symbols: Container[sympy.Symbol]
) -> str:
    """Why a result with the fake value `value` cannot have `placement`; "" where it can.

    symbols: those that stand for a size of an input, so that other sizes can be computed from them.
    """
    if isinstance(placement, Whole | Scalar | Local | Many):
        return ""
    if not isinstance(value, torch.Tensor):
        return "has no rule for a result that is not a tensor"
    match placement:
        case Split(dim, Base(per_batch_row) | Sorted(_, _, per_batch_row)):
            rows = per_batch_row * batch
            size = expression(value.shape[dim]) if 0 <= dim < value.dim() else sympy.nan
            # The way back of an exchange has as many rows as its splits say, by their proof.
            is_by_splits = isinstance(placement.rows, Sorted) and not is_computable(size, symbols)
            if not (is_by_splits or same(size, rows)):
                return f"has the shape {list(value.shape)}, expected {rows} rows along dim {dim}"
            if not is_computable(per_batch_row, symbols):
                return f"has {per_batch_row} rows for each batch row, which no input's sizes give"
        case Partial() if not holds_sums(value.dtype):
            return f"sums rows in {value.dtype}, expected fp32 or better for sums over slices"
        case Counts(form):
            sizes = zip(form.matrix.shape, value.shape, strict=False)
            is_right = form.matrix.ndim == value.dim() + 1 and all(
                same(expression(size), sympy.Integer(expected)) or isinstance(size, torch.SymInt)
                for expected, size in sizes
            )
            if not is_right:
                return (
                    f"has the shape {list(value.shape)}, expected {form.matrix.shape[:-1]} counts"
                )
            if not holds(value.dtype, MAX_COUNT):
                return f"counts rows in {value.dtype}, which is not exact"
        case _:
            pass
    return ""


def is_computable(expr: sympy.Expr, symbols: Container[sympy.Symbol]) -> bool:
    """Whether a size can be written with the operators of Python from the sizes of the inputs."""
    if isinstance(expr, sympy.Integer):
        return True
    if isinstance(expr, sympy.Symbol):
        return expr in symbols
    if isinstance(expr, sympy.Pow):
        return bool(expr.exp.is_Integer and expr.exp > 0) and is_computable(expr.base, symbols)
    if isinstance(expr, sympy.Mul | sympy.Add | FloorDiv):
        return all(is_computable(arg, symbols) for arg in expr.args)  # pyright: ignore
    return False


def fill_of(node: fx.Node) -> float | None:
    """The constant that a creation operator fills with; None where it is none."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _ZEROS:
        value: Any = 0.0
    elif packet in _ONES:
        value = 1.0
    elif packet in _FULLS:
        arguments = schema_arguments(node)
        value = arguments.get("fill_value", arguments.get("value"))
    else:
        return None
    result = graph.fake_value(node)
    if not isinstance(value, bool | int | float) or not isinstance(result, torch.Tensor):
        return None
    return kept_by(result.dtype, float(value))


def kept_by(dtype: torch.dtype, value: float) -> float | None:
    """`value` if a cast to `dtype` keeps it."""
    return value if complex(torch.tensor(value).to(dtype).item()) == value else None


aten = torch.ops.aten
_ZEROS = (aten.zeros, aten.new_zeros, aten.zeros_like, aten.zero)
_ONES = (aten.ones, aten.new_ones, aten.ones_like)
_FULLS = (aten.full, aten.new_full, aten.full_like, aten.fill)

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
    """The operator behind a call as users know it, such as `aten.linear`."""
    return name_of(getattr(node.target, "overloadpacket", node.target))


def name_of(operator: Any) -> str:
    """The name of an OpOverloadPacket or function, such as `aten.linear` or `operator.add`."""
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return str(operator)
    name = getattr(operator, "__name__", str(operator))
    module = getattr(operator, "__module__", "").lstrip("_")
    return f"operator.{name}" if module == "operator" else f"torch.{name}" if module else name
