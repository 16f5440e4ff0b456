"""slice: the forward is instantiated once per slice of the batch; results are joined where asked.

    before   h = linear(x, w);  a = all_to_all(h[order]);  ...;  loss = mean(y)
    after    x0, x1 = split(x)
             h0 = linear(x0, w);  h1 = linear(x1, w)
             a0 = all_to_all(h0[order0]);  a1 = all_to_all(h1[order1]);  ...
             loss = mean(cat(y0, y1))

Why it is correct: every value has a proven placement on the slice axis (`overlap.placement`), and
autograd derives the backward of the sliced program itself. What has no proof is computed once, on
joined values; where its operands cannot be joined, the exchange they belong to stays un-sliced.

Cost: one launch per node and slice; a copy per join.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from overlap import collectives, graph
from overlap import placement as pl
from overlap.errors import PassError
from overlap.graph import Phase, Tag
from overlap.pipeline import Context, Effect
from overlap.placement import Base, Counts, Decision, Many, Op, Partial, Refusal, Scalar, Split
from overlap.rules.scalars import fill_of

aten = torch.ops.aten
_HEAVY = (aten.linear, aten.matmul, aten.mm, aten.addmm, aten.bmm, aten.einsum)


@dataclasses.dataclass(frozen=True)
class Slice:
    """Slice along the batch axis into `slices` parts; 1 leaves the graph alone."""

    slices: int
    name: str = "slice"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        if self.slices == 1:
            return
        plan = analyse(gm)
        for refused in plan.refused:
            ctx.remark("refused", refused.message, refused.node, refused.advice)
        if not plan.sliced_starts:
            return
        instantiate(gm, plan, self.slices)


def instantiate(gm: fx.GraphModule, plan: Plan, slices: int) -> None:
    """Replace the graph of `gm` by the one in which `slices` slices do what `plan` says."""
    gm.graph = _Emitter(gm, plan, slices).emit()
    graph.propagate_fake_values(gm)


# --- analysis -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What slicing makes of every node; pure, decided before the graph is touched.

    batch: the batch size.
    decisions: per node, in program order.
    sliced_starts: names of the collectives that run once per slice.
    refused: what could not be sliced, and why.
    """

    batch: sympy.Expr
    batch_input: fx.Node
    decisions: dict[fx.Node, Decision]
    sliced_starts: tuple[str, ...]
    refused: tuple[Refused, ...]

    @property
    def reassociated(self) -> tuple[str, ...]:
        return tuple(d.reassociates for d in self.decisions.values() if d.reassociates)


@dataclasses.dataclass(frozen=True)
class Refused:
    """A node that is not sliced, what follows from it, and what the user can change."""

    node: fx.Node
    message: str
    advice: str


class _Unjoinable(Exception):
    """A refused operator reads rows that cannot be joined; `keys` names the routing behind them."""

    def __init__(self, keys: frozenset[str], refusal: Refusal, node: fx.Node) -> None:
        super().__init__(refusal.reason)
        self.keys = keys
        self.refusal = refusal
        self.node = node


def analyse(gm: fx.GraphModule) -> Plan:
    """Prove what can be sliced along dim 0 of the data inputs.

    Raises PassError where a value that slices would need is mutated in a way that has no
    out-of-place form.
    """
    batch_input, batch = _batch_of(gm)
    forced: dict[str, Refused] = {}
    while True:
        try:
            decisions, refused = _decide(gm, batch, frozenset(forced))
            break
        except _Unjoinable as problem:
            keys = sorted(problem.keys - set(forced))
            if not keys:
                raise PassError(
                    f"slice: {_place_of(problem.node)} cannot be sliced along the batch: "
                    f"{problem.refusal.reason}"
                ) from problem
            for key in keys:
                forced[key] = _remark(problem.node, problem.refusal, "its exchange is not sliced")
    decisions = _trim(gm, decisions)
    starts = tuple(
        node.name
        for node in gm.graph.nodes
        if collectives.is_start(node)
        and not decisions[node].once
        and pl.is_sliced(decisions[node].placement)
    )
    before_start = _ancestors(n for n in gm.graph.nodes if n.name in starts)
    remarks = list(forced.values())
    for node, refusal in refused:
        is_barrier = node in before_start
        if is_barrier or collectives.is_start(node):
            remarks.append(_remark(node, refusal, "the slices are joined before it"))
    return Plan(batch, batch_input, decisions, starts, tuple(remarks))


def _batch_of(gm: fx.GraphModule) -> tuple[fx.Node, sympy.Expr]:
    for node in graph.placeholders(gm.graph):
        value = graph.fake_value(node)
        if isinstance(value, torch.Tensor) and value.dim() and not graph.is_module_state(node):
            return node, pl.expression(value.shape[0])
    raise PassError("slice: the graph has no data input with a batch dim; nothing can be sliced")


def _remark(node: fx.Node, refusal: Refusal, consequence: str) -> Refused:
    return Refused(node, f"{refusal.reason}; {consequence}", refusal.advice)


def _place_of(node: fx.Node) -> str:
    module, line = graph.module_path(node), graph.source_line(node)
    at = f" ({line})" if line else ""
    return f"{module or node.name}{at}"


def _decide(
    gm: fx.GraphModule, batch: sympy.Expr, forced: frozenset[str]
) -> tuple[dict[fx.Node, Decision], list[tuple[fx.Node, Refusal]]]:
    """A decision per node, in program order; refused operators are computed once, on joins."""
    decisions: dict[fx.Node, Decision] = {}
    placements: dict[fx.Node, pl.Placement] = {}
    refused: list[tuple[fx.Node, Refusal]] = []
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        op = Op(node, pl.schema_arguments(node), placements, batch)
        try:
            decision = _decision(op)
        except Refusal as refusal:
            decision = _join(op, refusal)
            refused.append((node, refusal))
        placements[node] = _without_forced(decision.placement, forced)
        decisions[node] = dataclasses.replace(decision, placement=placements[node])
    return decisions, refused


def _decision(op: Op) -> Decision:
    node = op.node
    if node.op == "placeholder":
        return Decision(_input_placement(op), once=True)
    sliced = [n for n in op.operands if pl.is_sliced(op.place(n))]
    if not sliced:
        return Decision(_whole(op), once=True)
    if node.target is operator.getitem:
        source = op.place(node.args[0])
        assert isinstance(source, Many)
        return Decision(source.items[node.args[1]])
    if _is_mutable(node):
        if pl.is_sliced(op.place(node.args[0])):
            raise op.refuse("writes into a value of the batch in place", "use its functional form")
        raise op.refuse("writes into a value that every slice shares")
    rule = pl.rule_for(node)
    if rule is None:
        raise op.refuse("has no placement rule", "register one with overlap.register_rule")
    return rule(op)


def _input_placement(op: Op) -> pl.Placement:
    value = graph.fake_value(op.node)
    is_data = isinstance(value, torch.Tensor) and not graph.is_module_state(op.node)
    if is_data and value.dim() and pl.same(pl.expression(value.shape[0]), op.batch):
        return Split(0, Base(sympy.Integer(1)))
    return pl.WHOLE


def _whole(op: Op) -> pl.Whole:
    constant: tuple[int, ...] | None = None
    node = op.node
    if node.op == "call_function" and getattr(node.target, "overloadpacket", None) is aten.arange:
        end = op.get("end")
        if isinstance(end, int) and op.get("start", 0) == 0 and op.get("step", 1) == 1:
            constant = tuple(range(end))
    elif node.op == "call_function":
        constant = _constant_of(op)
    return pl.Whole(constant, fill_of(node))


_CONSTANT_OPS = (
    aten.view, aten.reshape, aten.repeat, aten.flatten, aten.to, aten._to_copy, aten.unsqueeze,
    aten.expand, aten.remainder, aten.floor_divide, aten.t, aten.contiguous, aten.clone,
)  # fmt: skip


def _constant_of(op: Op) -> tuple[int, ...] | None:
    """Small integer tensors that are known while compiling, such as `arange(E).repeat(n)`."""
    node = op.node
    if not graph.is_call(node, *_CONSTANT_OPS) or len(op.operands) != 1:
        return None
    source = op.place(op.operands[0])
    if not isinstance(source, pl.Whole) or source.constant is None:
        return None
    shape = [int(s) for s in pl.shape_of(op.operands[0]) if s.is_Integer]
    args = fx.node.map_arg(
        node.args, lambda _: torch.tensor(source.constant, dtype=torch.int64).reshape(shape)
    )
    result = node.target(*args)
    return tuple(result.reshape(-1).tolist())


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _join(op: Op, refusal: Refusal) -> Decision:
    """Compute the node once, on joined operands; rows in batch order are sliced again after it."""
    blocked = [n for n in op.operands if not pl.is_joinable(op.place(n))]
    if _is_mutable(op.node) and pl.is_sliced(op.place(op.node.args[0])):
        blocked = [op.node.args[0]]
    if blocked:
        keys = frozenset(k for n in blocked for k in _keys(op.place(n)))
        raise _Unjoinable(keys, refusal, op.node)
    return Decision(_sliced_again(op), once=True)


def _sliced_again(op: Op) -> pl.Placement:
    value = graph.fake_value(op.node)
    if not isinstance(value, torch.Tensor) or _is_mutable(op.node):
        return Many((pl.WHOLE,) * len(value)) if isinstance(value, list | tuple) else pl.WHOLE
    for operand in op.operands:
        match op.place(operand):
            case Split(dim, Base(per_batch_row)) if dim < len(op.shape) and pl.same(
                op.shape[dim], per_batch_row * op.batch
            ):
                return Split(dim, Base(per_batch_row))
    return pl.WHOLE


_KEY = re.compile(r"hist:([^:]+)")


def _keys(placement: pl.Placement) -> set[str]:
    """The routing keys that a placement depends on."""
    match placement:
        case Split(_, pl.Sorted(_, key)) | Split(_, pl.Received(_, _, pl.Sorted(_, key))):
            return {key}
        case Split(_, pl.Length(length)):
            return set(_KEY.findall(length.base))
        case Split(_, _, pl.RowIndex(pl.Sorted(_, key))):
            return {key}
        case Counts(form) | Scalar(form):
            return set(_KEY.findall(form.base))
        case Many(items):
            return {key for item in items for key in _keys(item)}
        case _:
            return set()


def _without_forced(placement: pl.Placement, forced: frozenset[str]) -> pl.Placement:
    """Ids whose exchange must stay un-sliced are plain data: what is routed by them is joined."""
    match placement:
        case Split(dim, rows, pl.Ids(key)) if key in forced:
            return Split(dim, rows)
        case Many(items):
            return Many(tuple(_without_forced(item, forced) for item in items))
        case _:
            return placement


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _trim(gm: fx.GraphModule, decisions: dict[fx.Node, Decision]) -> dict[fx.Node, Decision]:
    """Leave out of the region what gains nothing: lookups of inputs before it; behind its last
    collective whatever is whole already, and products that would enlarge what has to be joined."""
    before_start = _ancestors(n for n in gm.graph.nodes if collectives.is_start(n))
    result = dict(decisions)

    def is_whole(node: fx.Node) -> bool:
        return result[node].once or not pl.is_sliced(result[node].placement)

    for node, decision in decisions.items():
        if decision.once or not isinstance(decision.placement, Split):
            continue
        sliced = [n for n in node.all_input_nodes if pl.is_sliced(decisions[n].placement)]
        if not all(pl.is_joinable(decisions[n].placement) for n in sliced):
            continue
        is_tail = node not in before_start
        all_whole = all(is_whole(n) for n in sliced)
        is_lookup = all_whole and graph.is_call(node, aten.embedding)
        if is_lookup or (is_tail and (all_whole or _enlarges(node, sliced))):
            result[node] = dataclasses.replace(decision, once=True, narrow={}, replace={})
    return result


def _enlarges(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    if not graph.is_call(node, *_HEAVY):
        return False
    inputs = sum(pl.product(pl.shape_of(n)) for n in operands)
    ratio = sympy.cancel(pl.product(pl.shape_of(node)) / inputs) if inputs != 0 else sympy.nan
    return bool(ratio.is_number and ratio > 1)


# --- emission -------------------------------------------------------------------------------------


class _Emitter:
    """Writes the sliced graph; every choice was made in the plan.

    `whole` and `slices` hold what nodes were emitted as; `cuts` and `joins` what was derived from
    them, by grad mode, since a cut or join made under no_grad carries no gradient.
    """

    def __init__(self, gm: fx.GraphModule, plan: Plan, num_slices: int) -> None:
        self.gm, self.plan, self.num_slices = gm, plan, num_slices
        self.graph = fx.Graph()
        self.whole: dict[fx.Node, Any] = {}
        self.slices: dict[fx.Node, list[Any]] = {}
        self.cuts: dict[tuple[fx.Node, int, bool], list[Any]] = {}
        self.joins: dict[tuple[fx.Node, bool], Any] = {}
        self.symbols: dict[sympy.Expr, Any] = {}
        self.lengths: list[Any] = []
        self.grad = True
        self.current: fx.Node | None = None

    def emit(self) -> fx.Graph:
        nodes = list(self.gm.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in inputs:
            self._emit_input(node)
        self._emit_lengths()
        for node in nodes[len(inputs) :]:
            self.current = node
            if node.op == "output":
                output = self.graph.output(fx.node.map_arg(node.args[0], self._join))
                graph.copy_facts(node, output)
            else:
                self._emit_call(node, self.plan.decisions[node])
        return self.graph

    def _emit_input(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node)
        graph.copy_source(node, new)
        self.whole[node] = new
        value = graph.fake_value(node)
        if isinstance(value, torch.SymInt):
            self.symbols.setdefault(value.node.expr, new)

    def _emit_lengths(self) -> None:
        """Batch rows of every slice; the cut before slice i is `B * i // N`."""
        batch = self._expression(self.plan.batch)
        floor = self._floor_div
        cuts = [floor(self._mul(batch, i), self.num_slices) for i in range(self.num_slices)]
        cuts.append(batch)
        self.lengths = [self._sub(b, a) for a, b in zip(cuts, cuts[1:], strict=False)]

    def _mul(self, a: Any, b: Any) -> Any:
        return self._arithmetic(operator.mul, a, b)

    def _sub(self, a: Any, b: Any) -> Any:
        return a if b == 0 and isinstance(b, int) else self._arithmetic(operator.sub, a, b)

    def _floor_div(self, a: Any, b: Any) -> Any:
        return self._arithmetic(operator.floordiv, a, b)

    def _arithmetic(self, function: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
            return function(a, b)
        if function is operator.mul and 0 in (a, b):
            return 0
        if function is operator.mul and 1 in (a, b):
            return b if a == 1 else a
        if function is operator.floordiv and a == 0:
            return 0
        return self.graph.call_function(function, (a, b))

    def _expression(self, expr: sympy.Expr) -> Any:
        """A size as a literal or as nodes, from the sizes that came in as inputs."""
        if expr.is_Integer:
            return int(expr)
        if expr in self.symbols:
            return self.symbols[expr]
        match expr:
            case sympy.Symbol():
                return self.symbols.setdefault(expr, self._size_of_symbol(expr))
            case sympy.Mul() | sympy.Add():
                function = operator.mul if isinstance(expr, sympy.Mul) else operator.add
                terms = [self._expression(arg) for arg in expr.args]
                value = terms[0]
                for term in terms[1:]:
                    value = self._arithmetic(function, value, term)
                return value
            case sympy.Pow() if expr.exp.is_Integer and expr.exp > 0:
                value = self._expression(expr.base)
                result = value
                for _ in range(int(expr.exp) - 1):
                    result = self._arithmetic(operator.mul, result, value)
                return result
            case _ if type(expr).__name__ == "FloorDiv":
                a, b = (self._expression(arg) for arg in expr.args)
                return self._floor_div(a, b)
        raise PassError(f"slice: cannot compute the size {expr} from the inputs of the graph")

    def _size_of_symbol(self, symbol: sympy.Symbol) -> fx.Node:
        for node in graph.placeholders(self.gm.graph):
            value = graph.fake_value(node)
            if not isinstance(value, torch.Tensor):
                continue
            for dim, size in enumerate(value.shape):
                if pl.expression(size) == symbol:
                    return self.graph.call_function(aten.sym_size.int, (self.whole[node], dim))
        raise PassError(f"slice: no input of the graph has the size {symbol}")

    # one node of the program as written

    def _emit_call(self, node: fx.Node, decision: Decision) -> None:
        if decision.drop:
            return
        if graph.is_call(node, aten.sym_size) and decision.once:
            value = graph.fake_value(node)
            if pl.is_sliced(self.plan.decisions[node.args[0]].placement):
                self.whole[node] = self._expression(pl.expression(value))
                return
        if decision.once:
            self.whole[node] = self._copy(node, node.args, node.kwargs, self._join, None)
            if node.target is torch._C._set_grad_enabled:
                self.grad = bool(node.args[0])
        elif decision.first_slice:
            self.whole[node] = self._copy(
                node, node.args, node.kwargs, lambda n: self._slice(n, 0), None
            )
        elif not pl.is_sliced(decision.placement) and node.op == "call_function":
            self.whole[node] = self._copy(node, node.args, node.kwargs, self._join, None)
        else:
            args, kwargs = _with_replaced(node, decision)
            self.slices[node] = [
                self._copy(node, args, kwargs, lambda n, i=i: self._operand(n, i, decision), i)
                for i in range(self.num_slices)
            ]

    def _copy(self, node: fx.Node, args: Any, kwargs: Any, operand: Any, index: int | None) -> Any:
        def value(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return operand(arg)
            return self._expression(arg) if isinstance(arg, sympy.Expr) else arg

        new_args = fx.node.map_aggregate(args, value)
        new_kwargs = fx.node.map_aggregate(kwargs, value)
        new = self.graph.create_node(node.op, node.target, new_args, new_kwargs)
        graph.copy_facts(node, new)
        if index is not None:
            graph.set_tag(new, Tag(slice=index, region="batch"))
        return new

    def _operand(self, node: fx.Node, index: int, decision: Decision) -> Any:
        if node in decision.narrow:
            dim, per_batch_row = decision.narrow[node]
            return self._cut(node, dim, per_batch_row)[index]
        return self._slice(node, index)

    def _slice(self, node: fx.Node, index: int) -> Any:
        if node in self.slices:
            return self.slices[node][index]
        placement = self.plan.decisions[node].placement
        if not isinstance(placement, Split):
            return self.whole[node]
        assert isinstance(placement.rows, Base)
        return self._cut(node, placement.dim, placement.rows.per_batch_row)[index]

    def _cut(self, node: fx.Node, dim: int, per_batch_row: sympy.Expr) -> list[Any]:
        """Every slice's rows of a whole value at once: the backward of one split is one cat."""
        for grad in (True, False) if not self.grad else (True,):
            if (node, dim, grad) in self.cuts:
                return self.cuts[node, dim, grad]
        rows = self._expression(per_batch_row)
        sizes = [self._mul(rows, length) for length in self.lengths]
        whole = self._derived(aten.split_with_sizes.default, self.whole[node], sizes, dim)
        pieces = [self._derived(operator.getitem, whole, i) for i in range(self.num_slices)]
        for i, piece in enumerate(pieces):
            graph.set_tag(piece, Tag(slice=i, region="batch"))
        self.cuts[node, dim, self.grad] = pieces
        return pieces

    def _join(self, node: fx.Node) -> Any:
        if node in self.whole:
            return self.whole[node]
        for grad in (True, False) if not self.grad else (True,):
            if (node, grad) in self.joins:
                return self.joins[node, grad]
        joined = self._joined(self.plan.decisions[node].placement, self.slices[node])
        self.joins[node, self.grad] = joined
        return joined

    def _joined(self, placement: pl.Placement, slices: list[Any]) -> Any:
        match placement:
            case Split(dim, Base()):
                return self._derived(aten.cat.default, slices, dim)
            case Scalar():
                return self._derived(torch.sym_sum, tuple(slices))
            case Partial() | Counts():
                joined = slices[0]
                for piece in slices[1:]:
                    joined = self._derived(aten.add.Tensor, joined, piece)
                return joined
            case _:
                raise AssertionError(f"{placement} cannot be joined")

    def _derived(self, target: Any, *args: Any) -> fx.Node:
        new = self.graph.call_function(target, args)
        if self.current is not None:
            graph.copy_facts(self.current, new)
        return new


def _with_replaced(node: fx.Node, decision: Decision) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with those that the decision rewrites, each where the call has it."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if not decision.replace:
        return tuple(args), kwargs
    names = [argument.name for argument in node.target._schema.arguments]
    for name, value in decision.replace.items():
        at = names.index(name)
        if at < len(args):
            args[at] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs
