"""Run a module sliced, in one process, beside the same module as written.

`compare(module, make_inputs, ...)` captures the module through Dynamo, proves what may be sliced,
writes the sliced program for each number of slices, runs it through autograd with plain kernels and
compares outputs, loss, all gradients and mutated buffers. The loss weighs every element differently,
so that flips and swaps of rows show.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import default_partition, make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from overlap import capture, graph, presets, slicing
from overlap import placement as pl
from overlap.backend import as_written
from overlap.certificate import Certificate
from overlap.config import Config
from overlap.errors import PassError
from overlap.instantiate import instantiate
from overlap.passes.functionalize import functionalize
from overlap.passes.merge_wgrad import Inexact
from overlap.passes.slice import ANALYSES
from overlap.pipeline import Context
from overlap.pipeline import run as run_passes

RTOL = 2e-5
"""Of the largest element; sums of a few hundred fp32 terms in another order."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run leaves."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Slicer:
    """A Dynamo backend that captures once and runs as `pick` slices. With a certificate, exactly:
    with the joint passes, and as written where something is in the way (`error` says what)."""

    def __init__(
        self,
        slices: Sequence[int],
        trim: bool = False,
        axis: str = "batch",
        exact: Certificate | None = None,
    ) -> None:
        self.slices, self.trim, self.axis, self.exact = slices, trim, axis, exact
        self.pick = slices[0]
        self.plan: slicing.Plan | None = None
        self.error: str = ""
        self.num_compiles = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.num_compiles += 1
        try:
            captured = capture.to_aten(gm).gm
        except capture.CaptureError as error:
            self.error = str(error)
            return plain(gm, inputs)
        functionalize(captured.graph)
        captured.recompile()
        if self.trim or self.axis != "batch":
            self.plan = ANALYSES[self.axis](captured, exact=self.exact)
        else:
            self.plan = slicing.prove(captured, exact=self.exact)
        variants: dict[int, Callable[..., Any]] = {}
        for n in self.slices:
            variant = fx.GraphModule(captured, captured.graph)
            try:
                instantiate(variant, self.plan, n)
                check_arguments_carried(captured, variant, self.plan)
                variants[n] = self.through_autograd(variant, inputs, n)
            except PassError as error:
                if self.exact is None:
                    raise
                self.error = str(error)
                variants[n] = as_written(gm, inputs)
        return lambda *args: variants[self.pick](*args)

    def through_autograd(self, gm: fx.GraphModule, inputs: Sequence[Any], n: int) -> Any:
        if self.exact is None:
            return plain(gm, inputs)

        def partition(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
            ctx = Context(Config(), lambda _: 2)
            graph.set_phase(joint, graph.Phase.JOINT)
            joint_passes = presets.moe(n, self.axis, exact=True).joint
            run_passes(joint, [p for p in joint_passes if p.name != "recompute"], ctx)
            if inexact := ctx.take(Inexact):
                raise PassError(f"mixed in {inexact.nodes}")
            return default_partition(joint, *args, **options)

        return plain(gm, inputs, partition)

    @property
    def refused(self) -> set[str]:
        """Names of the operators that are computed once though they read rows of the batch."""
        assert self.plan is not None, self.error
        return {pl.operator_name(refused.node) for refused in self.plan.refused}

    @property
    def num_sliced(self) -> int:
        assert self.plan is not None, self.error
        return sum(self.plan.is_sliced(node) for node in self.plan.decisions)


def plain(
    gm: fx.GraphModule, inputs: Sequence[Any], partition: Any = default_partition
) -> Callable[..., Any]:
    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=compiler, inference_compiler=compiler, partition_fn=partition)(
        gm, inputs
    )


def check_arguments_carried(
    before: fx.GraphModule, after: fx.GraphModule, plan: slicing.Plan
) -> None:
    """Every literal argument of a sliced operator is in each of its calls, but for what its rule
    said it replaces. A slice of experts may need no split, and so no part of one."""
    calls: dict[tuple[Any, str], list[dict[str, Any]]] = {}
    for node in after.graph.nodes:
        key = (node.target, graph.stack_trace(node))
        calls.setdefault(key, []).append(pl.schema_arguments(node))
    for node, decision in plan.decisions.items():
        if node.op != "call_function" or not plan.is_sliced(node) or decision.drop:
            continue
        if plan.axis == "expert" and node.target is operator.getitem:
            continue
        literals = {
            name: value
            for name, value in pl.schema_arguments(node).items()
            if name not in decision.replace and isinstance(value, bool | int | float | str | None)
        }
        found = calls[node.target, graph.stack_trace(node)]
        assert any(literals.items() <= call.items() for call in map(_hashable, found)), node


def _hashable(call: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in call.items() if isinstance(v, bool | int | float | str | None)}


def run(module: nn.Module, call: Callable[..., Any], inputs: Sequence[Any]) -> Outcome:
    """One forward and backward through `call`, the module or what was compiled of it."""
    fresh = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
    for x in fresh:
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    module.zero_grad()
    torch.manual_seed(1)
    result = call(*fresh)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    terms = [weighed(y) for y in outputs if y.requires_grad]
    if terms:
        torch.stack(terms).sum().backward()
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors |= {f"input {i}": x for i, x in enumerate(fresh) if isinstance(x, Tensor)}
    return Outcome(
        [y.detach().clone() for y in outputs],
        {name: t.grad.clone() for name, t in tensors.items() if t.grad is not None},
        {name: buffer.clone() for name, buffer in module.named_buffers()},
    )


def weighed(y: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(y.numel())
    weights = torch.rand(y.shape, generator=generator, dtype=torch.float64) + 0.5
    return (y.double() * weights).sum() if not y.is_complex() else (y.abs() * weights).sum()


def check_same(found: Outcome, expected: Outcome, rtol: float = RTOL) -> None:
    assert len(found.outputs) == len(expected.outputs)
    for i, (y, z) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        assert y.shape == z.shape and y.dtype == z.dtype, f"output {i}: {y.shape}, {z.shape}"
        check_close(f"output {i}", y, z, rtol, _scale(z))
    assert found.gradients.keys() == expected.gradients.keys()
    # A floor beside the relative error: some gradients are zero in theory.
    floor = max((_scale(g) for g in expected.gradients.values()), default=0.0)
    for name, g in expected.gradients.items():
        check_close(f"gradient of {name}", found.gradients[name], g, rtol, floor)
    for name, buffer in expected.buffers.items():
        check_close(f"buffer {name}", found.buffers[name], buffer, rtol, _scale(buffer))


def _scale(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() and x.is_floating_point() else 1.0


def check_close(what: str, x: Tensor, y: Tensor, rtol: float, scale: float) -> None:
    if not x.numel():
        return
    error = (x.double() - y.double()).abs()
    error = error[~(x == y)]
    error = error[~(x.isnan() & y.isnan())[~(x == y)]] if rtol == 0 else error
    assert not error.numel() or float(error.max()) <= rtol * max(scale, 1e-6), (
        f"{what} is off by {float(error.max()):.2e} of {scale:.2e}"
    )


def compare(
    module: nn.Module,
    batches: Sequence[Sequence[Any]],
    slices: Sequence[int] = (2, 3),
    dynamic: bool = True,
    rtol: float = RTOL,
    trim: bool = False,
    axis: str = "batch",
    exact: Certificate | None = None,
) -> Slicer:
    """Compare every batch for every number of slices; the slicer tells what was proven. With an
    `rtol` of 0, bitwise; with a certificate, with the program as written through autograd's
    operators, since norms and the like are others in eager mode."""
    torch._dynamo.reset()
    slicer = Slicer(slices, trim, axis, exact)
    sliced = copy.deepcopy(module)
    compiled = torch.compile(sliced, backend=slicer, fullgraph=True, dynamic=dynamic)
    written: Any = module
    if exact is not None:
        written = torch.compile(module, backend=as_written, fullgraph=True, dynamic=dynamic)
    state = copy.deepcopy(module.state_dict())
    for batch in batches:
        for n in slices:
            slicer.pick = n
            for m in (module, sliced):
                m.load_state_dict(state)
            expected = run(module, written, batch)
            check_same(run(sliced, compiled, batch), expected, rtol)
    return slicer
