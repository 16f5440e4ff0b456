"""slice: the forward is instantiated once per slice of the batch; results are joined where asked.

    before   h = linear(x, w);  a = all_to_all(h[order]);  ...;  loss = mean(y)
    after    x0, x1 = split(x)
             h0 = linear(x0, w);  h1 = linear(x1, w)
             a0 = all_to_all(h0[order0]);  a1 = all_to_all(h1[order1]);  ...
             loss = mean(cat(y0, y1))

Why it is correct: every value has a proven placement on the slice axis (`overlap.slicing`), and
autograd derives the backward of the sliced program itself. What has no proof is computed once, on
joined values; where its operands cannot be joined, the exchange they belong to stays un-sliced.

Cost: one launch per node and slice; a copy per join.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._sympy.functions import FloorDiv

from overlap import graph, slicing
from overlap import placement as pl
from overlap.errors import PassError
from overlap.graph import Phase, Tag
from overlap.pipeline import Context, Effect
from overlap.placement import Base, Counts, Decision, Partial, Split
from overlap.slicing import Plan

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Sliced:
    """What slicing did, for the report.

    starts: names of the collectives of the program as written that run once per slice.
    reassociated: the sums that slicing reassociates.
    """

    starts: tuple[str, ...]
    reassociated: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Slice:
    """Slice along the batch axis into `slices` parts; 1 leaves the graph alone.

    whole_step: whether the backward will be in one graph with the forward, so that slices gain by
        staying apart behind their last collective.
    """

    slices: int
    whole_step: bool = False
    name: str = "slice"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        if self.slices == 1:
            return
        try:
            plan = slicing.analyse(gm, trim_end=not self.whole_step)
            sliced = self._apply(gm, ctx, plan)
        except PassError as error:
            if ctx.config.strict:
                raise
            ctx.remark("refused", f"nothing is sliced: {error}")
            return
        ctx.provide(sliced)

    def _apply(self, gm: fx.GraphModule, ctx: Context, plan: Plan) -> Sliced:
        for refused in plan.remarks:
            ctx.remark("refused", refused.message, refused.node, refused.advice)
        if not plan.sliced_starts:
            if not plan.remarks:
                ctx.remark("note", "no collective reads rows of the batch, so nothing is sliced")
            return Sliced((), ())
        instantiate(gm, plan, self.slices)
        for node, decision in plan.decisions.items():
            if decision.note and not decision.once:
                ctx.remark("note", decision.note, node)
        return Sliced(plan.sliced_starts, plan.reassociated)


def instantiate(gm: fx.GraphModule, plan: Plan, slices: int) -> None:
    """Replace the graph of `gm` by the one in which `slices` slices do what `plan` says.

    Raises PassError, with the graph untouched, where torch cannot run the sliced graph on fake
    values: a size would have to be known that only the data gives.
    """
    sliced = fx.GraphModule(gm, _Emitter(gm, plan, slices).emit())
    try:
        graph.propagate_fake_values(sliced)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise PassError(f"the sliced program does not trace: {first_line}") from error
    gm.graph = sliced.graph


class _Sizes:
    """Writes sizes as nodes, computed from the sizes that come in as inputs of the graph."""

    def __init__(self, graph_: fx.Graph) -> None:
        self.graph = graph_
        self.known: dict[sympy.Expr, Any] = {}

    def add_input(self, new: fx.Node, value: Any) -> None:
        if isinstance(value, torch.SymInt):
            self.known.setdefault(value.node.expr, new)

    def add_tensor(self, new: fx.Node, value: Any) -> None:
        """Sizes that no input names are read from a tensor that has them."""
        if not isinstance(value, torch.Tensor):
            return
        for dim, size in enumerate(value.shape):
            symbol = pl.expression(size)
            if isinstance(symbol, sympy.Symbol) and symbol not in self.known:
                self.known[symbol] = self.graph.call_function(aten.sym_size.int, (new, dim))

    def write(self, expr: sympy.Expr) -> Any:
        """An int, or the node that computes `expr`. Raises PassError where no input gives it."""
        if expr.is_Integer:
            return int(expr)
        if expr in self.known:
            return self.known[expr]
        match expr:
            case sympy.Mul():
                value = self._fold(operator.mul, map(self.write, expr.args))
            case sympy.Add():
                value = self._fold(operator.add, map(self.write, expr.args))
            case sympy.Pow() if expr.exp.is_Integer and expr.exp > 0:
                value = self._fold(operator.mul, [self.write(expr.base)] * int(expr.exp))
            case FloorDiv():
                value = self.call(operator.floordiv, *[self.write(arg) for arg in _args(expr)])
            case _:
                raise PassError(f"the size {expr} cannot be computed from the inputs of the graph")
        self.known[expr] = value
        return value

    def _fold(self, function: Callable[..., Any], values: Iterable[Any]) -> Any:
        return functools.reduce(functools.partial(self.call, function), values)

    def call(self, function: Callable[..., Any], a: Any, b: Any) -> Any:
        """`function(a, b)`, folded where it is known or does nothing."""
        match function, a, b:
            case _, int(), int():
                return function(a, b)
            case (operator.mul, 0, _) | (operator.mul, _, 0) | (operator.floordiv, 0, _):
                return 0
            case (operator.mul, 1, other) | (operator.mul, other, 1) | (operator.sub, other, 0):
                return other
            case _:
                return self.graph.call_function(function, (a, b))


class _Emitter:
    """Writes the sliced graph; every choice was made in the plan.

    `whole` and `slices` hold what nodes were emitted as; `cuts` and `joins` what was derived from
    them, by grad mode, since a cut or join made under no_grad carries no gradient.
    """

    def __init__(self, gm: fx.GraphModule, plan: Plan, num_slices: int) -> None:
        self.gm, self.plan, self.num_slices = gm, plan, num_slices
        self.graph = fx.Graph()
        self.sizes = _Sizes(self.graph)
        self.whole: dict[fx.Node, Any] = {}
        self.slices: dict[fx.Node, list[Any]] = {}
        self.cuts: dict[tuple[fx.Node, int, bool], list[fx.Node]] = {}
        self.joins: dict[tuple[fx.Node, bool], Any] = {}
        self.lengths: list[Any] = []
        self.grad = True
        self.current: fx.Node | None = None

    def emit(self) -> fx.Graph:
        nodes = list(self.gm.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self._emit_inputs(inputs)
        self.lengths = self._slice_lengths()
        for node in nodes[len(inputs) :]:
            self.current = node
            if node.op == "output":
                output = self.graph.output(fx.map_arg(node.args[0], self._join))
                graph.copy_facts(node, output)
            else:
                self._emit_node(node, self.plan.decisions[node])
        return self.graph

    def _emit_inputs(self, inputs: Sequence[fx.Node]) -> None:
        for node in inputs:
            new = self.whole[node] = self.graph.node_copy(node)
            graph.copy_source(node, new)
            self.sizes.add_input(new, graph.fake_value(node))
        for node in inputs:
            self.sizes.add_tensor(self.whole[node], graph.fake_value(node))

    def _slice_lengths(self) -> list[Any]:
        """Batch rows of every slice; the cut before slice i is `B * i // N`."""
        call, batch = self.sizes.call, self.sizes.write(self.plan.batch)
        first_rows = [
            call(operator.floordiv, call(operator.mul, batch, i), self.num_slices)
            for i in range(self.num_slices)
        ]
        ends = [*first_rows[1:], batch]
        return [call(operator.sub, b, a) for a, b in zip(first_rows, ends, strict=True)]

    # one node of the program as written

    def _emit_node(self, node: fx.Node, decision: Decision) -> None:
        if decision.drop:
            return
        if decision.once and node.target is aten.sym_size.int and node.args[0] not in self.whole:
            self.whole[node] = self._whole_size(node)
        elif decision.once:
            self.whole[node] = self._copy(node, node.args, node.kwargs, self._join)
            if node.target is torch._C._set_grad_enabled:
                self.grad = bool(node.args[0])
        elif decision.first_slice or not pl.is_sliced(decision.placement):
            self.whole[node] = self._copy(node, node.args, node.kwargs, self._whole_or_first)
        else:
            args, kwargs = _with_replaced(node, decision)
            self.slices[node] = []
            for i in range(self.num_slices):
                operand = functools.partial(self._operand, index=i, decision=decision)
                new = self._copy(node, args, kwargs, operand)
                graph.set_tag(new, Tag(slice=i, region="batch"))
                self.slices[node].append(new)

    def _copy(
        self, node: fx.Node, args: Any, kwargs: Any, operand: Callable[[fx.Node], Any]
    ) -> fx.Node:
        def value(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return operand(arg)
            return self.sizes.write(arg) if isinstance(arg, sympy.Expr) else arg

        new = self.graph.create_node(
            node.op,
            node.target,
            map_aggregate(args, value),
            map_aggregate(kwargs, value),
        )
        graph.copy_facts(node, new)
        return new

    def _whole_size(self, node: fx.Node) -> Any:
        """The size of the program's value along its sliced dim, which only slices have."""
        expr = pl.expression(graph.fake_value(node))
        if pl.is_computable(expr, self.sizes.known):
            return self.sizes.write(expr)
        source, dim = graph.args_of(node)
        sizes = [self._derived(aten.sym_size.int, piece, dim) for piece in self.slices[source]]
        return self._derived(torch.sym_sum, tuple(sizes))

    # operands

    def _whole_or_first(self, node: fx.Node) -> Any:
        return self.whole[node] if node in self.whole else self.slices[node][0]

    def _operand(self, node: fx.Node, index: int, decision: Decision) -> Any:
        if node in decision.narrow:
            dim, per_batch_row = decision.narrow[node]
            return self._cut(node, dim, per_batch_row)[index]
        if node in self.slices:
            return self.slices[node][index]
        match self.plan.decisions[node].placement:
            case Split(dim, Base(per_batch_row)):
                return self._cut(node, dim, per_batch_row)[index]
            case placement:
                assert not pl.is_sliced(placement), f"{node} is whole and was proven {placement}"
                return self.whole[node]

    def _cut(self, node: fx.Node, dim: int, per_batch_row: sympy.Expr) -> list[fx.Node]:
        """Every slice's rows of a whole value at once: the backward of one split is one cat."""
        for grad in self._grads_that_serve():
            if (node, dim, grad) in self.cuts:
                return self.cuts[node, dim, grad]
        rows = self.sizes.write(per_batch_row)
        lengths = [self.sizes.call(operator.mul, rows, length) for length in self.lengths]
        split = self._derived(aten.split_with_sizes.default, self._join(node), lengths, dim)
        pieces = [self._derived(operator.getitem, split, i) for i in range(self.num_slices)]
        for i, piece in enumerate(pieces):
            graph.set_tag(piece, Tag(slice=i, region="batch"))
        self.cuts[node, dim, self.grad] = pieces
        return pieces

    def _join(self, node: fx.Node) -> Any:
        if node in self.whole:
            return self.whole[node]
        for grad in self._grads_that_serve():
            if (node, grad) in self.joins:
                return self.joins[node, grad]
        joined = self._joined(self.plan.decisions[node].placement, self.slices[node])
        self.joins[node, self.grad] = joined
        return joined

    def _grads_that_serve(self) -> tuple[bool, ...]:
        """Under no_grad a value that carries a gradient serves as well."""
        return (True,) if self.grad else (True, False)

    def _joined(self, placement: pl.Placement, slices: Sequence[fx.Node]) -> Any:
        match placement:
            case Split(dim, Base()):
                return self._derived(aten.cat.default, list(slices), dim)
            case Partial() | Counts():
                add = functools.partial(self._derived, aten.add.Tensor)
                return functools.reduce(add, slices)
            case pl.Many(items):
                parts: list[Any] = []
                for i, item in enumerate(items):
                    pieces = [self._derived(operator.getitem, piece, i) for piece in slices]
                    parts.append(self._joined(item, pieces))
                return parts
            case pl.Whole():
                return slices[0]
            case _:
                raise AssertionError(f"{placement} cannot be joined")

    def _derived(self, target: Any, *args: Any) -> fx.Node:
        new = self.graph.call_function(target, args)
        if self.current is not None:
            graph.copy_facts(self.current, new)
        return new


def _args(expr: sympy.Expr) -> tuple[Any, ...]:
    return expr.args


def _with_replaced(node: fx.Node, decision: Decision) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with those that the decision rewrites, each where the call has it."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if not decision.replace:
        return tuple(args), kwargs
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    for name, value in decision.replace.items():
        at = names.index(name)
        if at < len(args):
            args[at] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs
