"""A run as a thing of its own: its sizes in its own symbols, a text that is equal for equal runs,
and where its symbols are read when it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from overlap import graph, printing
from overlap.errors import OverlapError
from overlap.inner.cut import Run
from overlap.inner.sizes import RunSizes, stride_expression


class RunError(OverlapError):
    """A run cannot be compiled; the message is the reason. It stays eager."""


@dataclasses.dataclass(frozen=True)
class Binding:
    """Where the value of a symbol is read: operand `index`, a number, or that tensor's size `dim`;
    divided by `factor`."""

    index: int
    dim: int | None
    factor: int

    def read(self, operands: Sequence[Any]) -> int:
        operand = operands[self.index]
        return (operand if self.dim is None else operand.shape[self.dim]) // self.factor


@dataclasses.dataclass(frozen=True)
class Subject:
    """A run and its sizes.

    minima: of each symbol, 0 or 1; data may leave any number of rows, a batch has one at least.
    """

    run: Run
    sizes: RunSizes
    minima: tuple[int, ...]

    @classmethod
    def of(cls, run: Run, numbers: Mapping[Any, fx.Node]) -> Subject:
        """The subject of a run. Sizes that its tensors do not tell become inputs of it where
        `numbers`, the numbers that are known before it runs, has them."""
        sizes = RunSizes.of(_sizes_of(run))
        told = _told(run, sizes)
        missing = [
            numbers[meaning]
            for symbol, meaning in sizes.symbols.items()
            if symbol not in told and meaning in numbers
        ]
        shapes = next(_shape_envs(run), None)
        minima = [
            int(shapes is not None and bool(shapes.bound_sympy(meaning).lower >= 1))
            for meaning in sizes.symbols.values()
        ]
        run = dataclasses.replace(run, inputs=(*run.inputs, *missing))
        return cls(run, sizes, tuple(minima))

    @property
    def inputs(self) -> list[Any]:
        """The fake values of the run's inputs."""
        return [graph.fake_value(node) for node in self.run.inputs]

    @property
    def outputs(self) -> list[torch.Tensor]:
        return [graph.fake_value(node) for node in self.run.outputs]

    def body(self) -> fx.GraphModule:
        """The run as a graph: its inputs in, a tuple of its outputs out."""
        body = fx.Graph()
        copies = {node: body.placeholder(f"input_{i}") for i, node in enumerate(self.run.inputs)}
        for node in self.run.nodes:
            copies[node] = body.node_copy(node, copies.__getitem__)
        body.output(tuple(copies[node] for node in self.run.outputs))
        return fx.GraphModule(torch.nn.Module(), body)

    def key(self) -> str:
        """The run as text. Runs with one text compute the same, whatever slice or layer they are
        of, and whatever the batch: no name, symbol or hint of the graph is in it."""
        names = {node: f"i{i}" for i, node in enumerate(self.run.inputs)}
        lines = [f"{names[node]}: {self._type(graph.fake_value(node))}" for node in self.run.inputs]
        for i, node in enumerate(self.run.nodes):
            names[node] = f"n{i}"
            call = self._show((node.args, node.kwargs), names.__getitem__)
            lines.append(f"{names[node]} = {printing.function_name(node.target)}{call}")
        returned = [
            f"{names[node]}: {self._type(graph.fake_value(node))}" for node in self.run.outputs
        ]
        return "\n".join([f"at least {self.minima}", *lines, f"return {returned}"])

    def _type(self, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return f"int {self.sizes.form(value)}"
        shape = [self.sizes.form(size) for size in value.shape]
        strides = [self.sizes.form(stride_expression(stride)) for stride in value.stride()]
        return f"{value.dtype} {value.device} {shape} {strides}"

    def _show(self, value: Any, name: Callable[[fx.Node], str]) -> str:
        match value:
            case fx.Node():
                return name(value)
            case torch.SymInt():
                return str(self.sizes.form(value))
            case list() | tuple():
                return f"[{', '.join(self._show(item, name) for item in value)}]"
            case dict():
                return f"{{{', '.join(f'{k}={self._show(v, name)}' for k, v in value.items())}}}"
            case _:
                return repr(value)

    def bindings(self) -> tuple[Binding, ...]:
        """Where each symbol is read. Raises RunError if no input tells one."""
        told = _told(self.run, self.sizes)
        for symbol, meaning in self.sizes.symbols.items():
            if symbol not in told:
                raise RunError(f"no input of the run tells its size {meaning}")
        return tuple(told[symbol] for symbol in self.sizes.symbols)


def _told(run: Run, sizes: RunSizes) -> dict[Any, Binding]:
    """Where the symbols are read that an input tells."""
    told: dict[Any, Binding] = {}
    for index, node in enumerate(run.inputs):
        value = graph.fake_value(node)
        is_tensor = isinstance(value, torch.Tensor)
        for dim, size in enumerate(value.shape if is_tensor else (value,)):
            factor, symbol = sizes.form(size).as_coeff_Mul()
            if symbol.is_Symbol and factor > 0:
                told.setdefault(symbol, Binding(index, dim if is_tensor else None, int(factor)))
    return told


def _shape_envs(run: Run) -> Iterator[ShapeEnv]:
    for value in (graph.fake_value(node) for node in (*run.inputs, *run.nodes)):
        sizes = [size for tensor in graph.tensors_of(value) for size in tensor.shape]
        yield from (s.node.shape_env for s in (value, *sizes) if isinstance(s, torch.SymInt))


def _sizes_of(run: Run) -> Iterator[Any]:
    for node in (*run.inputs, *run.nodes):
        value = graph.fake_value(node)
        if isinstance(value, torch.SymInt | int):
            yield value
        for tensor in graph.tensors_of(value):
            yield from tensor.shape
            yield from map(stride_expression, tensor.stride())
