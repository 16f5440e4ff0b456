"""Inductor behind two doors: one run of a graph, and a whole program.

A run is traced to the operators that Inductor wants (its decompositions) and compiled as a graph of
its own, in a shape environment of its own whose sizes have no hint. So its source is made of the
run's structure alone, the same on ranks with other batches, and it adds no guard to the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from overlap import graph
from overlap.inner.runs import Kernels, digest_of
from overlap.inner.sizes import expression, stride_expression
from overlap.inner.subject import RunError, Subject

_COMMENT = re.compile(r"(#|//) .*")
_DEVICE_INDEX = re.compile(
    r"(cuda:|\bindex=|_DeviceGuard\(|set_device\(|get_raw_stream\(|\bstream)\d+"
)


def compile_program(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The whole program through Inductor, as `torch.compile(backend="inductor")` does it: its own
    decompositions before autograd, its partitioner, its order."""
    compiled: Any = compile_fx(gm, example_inputs)
    return compiled


def compile_run(subject: Subject) -> Kernels:
    """Kernels for one run. Raises RunError with the reason if there are none."""
    bindings = subject.bindings()
    try:
        function = _compile(subject)
    except RunError:
        raise
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise RunError(f"{type(error).__name__}: {first_line}") from error
    source = getattr(function, "source_code", "")
    is_tensor = tuple(isinstance(value, torch.Tensor) for value in subject.inputs)
    structure = digest_of([same_on_all_ranks(subject.key())])
    digest = digest_of([same_on_all_ranks(source)])
    return Kernels(function, bindings, is_tensor, source, structure, digest)


def _compile(subject: Subject) -> Callable[[list[Any]], Sequence[Any]]:
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), torch.no_grad():
        sizes = [_size_without_hint(shapes, least) for least in subject.minima]
        with mode:
            operands = [_operand(value, subject, sizes) for value in subject.inputs]
        tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
        with mode, enable_python_dispatcher():
            trace = make_fx(_call_of(subject), decomposition_table=select_decomp_table())
            gm = trace(*sizes, *tensors)
        _check_outputs(gm, subject, sizes)
        # Every result keeps its strides: what reads it was traced for them.
        output = graph.output_node(gm.graph)
        output.meta["user_visible_output_idxs"] = list(range(len(subject.run.outputs)))
        return compile_fx_inner(gm, [*sizes, *tensors])


def _size_without_hint(shapes: ShapeEnv, least: int) -> torch.SymInt:
    with shapes.ignore_fresh_unbacked_symbols():
        size = shapes.create_unbacked_symint()
    torch._check(size >= least)
    return size


def _operand(value: Any, subject: Subject, sizes: Sequence[Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return subject.sizes.evaluate(value, sizes)
    shape = [subject.sizes.evaluate(size, sizes) for size in value.shape]
    strides = [
        subject.sizes.evaluate(stride_expression(stride), sizes) for stride in value.stride()
    ]
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _call_of(subject: Subject) -> Callable[..., Any]:
    """The run as a function of its symbols and tensors."""
    body = fx.Interpreter(subject.body())

    def call(*values: Any) -> Any:
        sizes, tensors = values[: len(subject.sizes.symbols)], iter(values)
        for _ in sizes:
            next(tensors)
        return body.run(
            *(
                next(tensors)
                if isinstance(value, torch.Tensor)
                else subject.sizes.evaluate(value, sizes)
                for value in subject.inputs
            )
        )

    return call


def _check_outputs(gm: fx.GraphModule, subject: Subject, sizes: Sequence[Any]) -> None:
    """Decompositions may round otherwise; they may not lay out otherwise."""
    (found,) = graph.output_node(gm.graph).args
    assert isinstance(found, tuple | list)
    for node, made, value in zip(subject.run.outputs, found, subject.outputs, strict=True):
        assert isinstance(made, fx.Node)
        now = graph.fake_value(made)
        shape = [subject.sizes.evaluate(size, sizes) for size in value.shape]
        strides = [
            subject.sizes.evaluate(stride_expression(stride), sizes) for stride in value.stride()
        ]
        expected = [*map(expression, shape), *map(stride_expression, strides)]
        actual = [*map(expression, now.shape), *map(stride_expression, now.stride())]
        if value.dtype != now.dtype or expected != actual:
            raise RunError(
                f"{node} would be {now.dtype} of sizes and strides {actual}, not {value.dtype} of "
                f"{expected}"
            )


def same_on_all_ranks(source: str) -> str:
    """Generated code without comments, which name files, and without the index of a device."""
    lines = [_COMMENT.sub("", line) for line in source.splitlines()]
    return "\n".join(_DEVICE_INDEX.sub(r"\1", line) for line in lines)
