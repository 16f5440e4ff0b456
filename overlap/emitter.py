"""Writes the sliced graph that a plan describes; every choice was made in the plan.

    whole     what is computed once, on joined values
    slices    what is computed once per slice

How rows are cut and joined is the axis's own: by their position (`overlap.instantiate`), or by the
expert that they go to (`overlap.instantiate_experts`).
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._sympy.functions import FloorDiv

from overlap import exactness, graph
from overlap import placement as pl
from overlap.errors import PassError
from overlap.graph import Tag
from overlap.placement import Decision
from overlap.slicing import Plan

aten = torch.ops.aten


class Sizes:
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


class Emitter:
    """Writes the sliced graph; subclasses know how rows are cut and joined.

    `whole` and `slices` hold what nodes were emitted as; None stands for a slice that has no part
    of a value.
    """

    def __init__(self, gm: fx.GraphModule, plan: Plan, num_slices: int) -> None:
        self.gm, self.plan, self.num_slices = gm, plan, num_slices
        self.graph = fx.Graph()
        self.sizes = Sizes(self.graph)
        self.whole: dict[fx.Node, Any] = {}
        self.slices: dict[fx.Node, list[Any]] = {}
        self.joins: dict[tuple[fx.Node, bool, Any], Any] = {}
        self.reads: collections.Counter[fx.Node] = collections.Counter()
        self.grad = True
        self.current: fx.Node | None = None

    def emit(self) -> fx.Graph:
        nodes = list(self.gm.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self._emit_inputs(inputs)
        self.begin()
        for node in nodes[len(inputs) :]:
            self.current = node
            if node.op == "output":
                output = self.graph.output(fx.map_arg(node.args[0], self.join))
                graph.copy_facts(node, output)
            else:
                self.emit_node(node, self.plan.decisions[node])
        return self.graph

    def _emit_inputs(self, inputs: Sequence[fx.Node]) -> None:
        for node in inputs:
            new = self.whole[node] = self.graph.node_copy(node)
            graph.copy_source(node, new)
            self.sizes.add_input(new, graph.fake_value(node))
        for node in inputs:
            self.sizes.add_tensor(self.whole[node], graph.fake_value(node))

    def begin(self) -> None:
        """Write what all slices need of the inputs."""

    # one node of the program as written

    def emit_node(self, node: fx.Node, decision: Decision) -> None:
        if decision.drop:
            return
        if decision.once and node.target is aten.sym_size.int and node.args[0] not in self.whole:
            self.whole[node] = self._whole_size(node)
        elif decision.once:
            self.whole[node] = self.copy(node, node.args, node.kwargs, self.join)
            if node.target is torch._C._set_grad_enabled:
                self.grad = bool(node.args[0])
        elif decision.first_slice or not pl.is_sliced(decision.placement):
            self.whole[node] = self.copy(node, node.args, node.kwargs, self._whole_or_first)
        else:
            self.slices[node] = self.emit_slices(node, decision)

    def emit_slices(self, node: fx.Node, decision: Decision) -> list[Any]:
        """The node once per slice."""
        return [self.emit_slice(node, decision, i) for i in range(self.num_slices)]

    def emit_slice(self, node: fx.Node, decision: Decision, index: int) -> Any:
        args, kwargs = graph.arguments_with(node, decision.replace)
        operand = functools.partial(self.operand, index=index, decision=decision)
        return self.tagged(self.copy(node, args, kwargs, operand), index)

    def copy(
        self, node: fx.Node, args: Any, kwargs: Any, operand: Callable[[fx.Node], Any]
    ) -> fx.Node:
        self.reads.clear()

        def value(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                self.reads[arg] += 1
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

    def tagged(self, new: fx.Node, index: int) -> fx.Node:
        graph.set_tag(new, Tag(slice=index, region=self.plan.axis))
        return new

    def _whole_size(self, node: fx.Node) -> Any:
        """The size of the program's value along its sliced dim, which only slices have."""
        expr = pl.expression(graph.fake_value(node))
        if pl.is_computable(expr, self.sizes.known):
            return self.sizes.write(expr)
        source, dim = graph.args_of(node)
        sizes = [self.derived(aten.sym_size.int, piece, dim) for piece in self.slices[source]]
        return self.derived(torch.sym_sum, tuple(sizes))

    # operands

    def _whole_or_first(self, node: fx.Node) -> Any:
        if node in self.whole:
            return self.whole[node]
        return next(piece for piece in self.slices[node] if piece is not None)

    def operand(self, node: fx.Node, index: int, decision: Decision) -> Any:
        """What slice `index` reads where the program reads `node`."""
        raise NotImplementedError

    def join(self, node: fx.Node) -> Any:
        """The program's value of `node`."""
        if node in self.whole:
            return self.whole[node]
        use = self.use_of(node)
        for grad in self.grads_that_serve():
            if (node, grad, use) in self.joins:
                return self.joins[node, grad, use]
        self._check_layout(node)
        self.joins[node, self.grad, use] = self.joined(node)
        return self.joins[node, self.grad, use]

    def use_of(self, node: fx.Node) -> Any:
        """What tells the cuts and joins of a value apart that must not be shared.

        Autograd adds up the gradients of a value use by use, the last one first. A cut or join that
        several uses share would add up theirs before those of the uses between them; for three uses
        and more that is another order, which exact numerics does not allow.
        """
        if not self.plan.is_exact or exactness.num_uses(node) <= 2:
            return None
        return self.current, self.reads[node]

    def _check_layout(self, node: fx.Node) -> None:
        """Kernels may round otherwise by how their operands lie in memory, and a join lies in the
        order of its dims. Raises PassError where that changes, and bits must not."""
        if self.plan.is_exact and exactness.holds_reals(node) and not exactness.is_contiguous(node):
            raise PassError(
                f"{node.name} has to be joined and lies in another order in memory than its dims "
                "say, which kernels may round otherwise (numerics='exact'); make it contiguous"
            )

    def grads_that_serve(self) -> tuple[bool, ...]:
        """A cut or join made under no_grad carries no gradient; one that does serves there too."""
        return (True,) if self.grad else (True, False)

    def joined(self, node: fx.Node) -> Any:
        """The program's value of a node of which slices have parts."""
        raise NotImplementedError

    def derived(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = self.graph.call_function(target, args, kwargs)
        if self.current is not None:
            graph.copy_facts(self.current, new)
            graph.set_tag(new, Tag())  # the program may have been sliced along another axis before
        return new


def _args(expr: sympy.Expr) -> tuple[Any, ...]:
    return expr.args
