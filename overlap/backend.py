"""The torch.compile backend: Dynamo's graph in, a callable out.

    Dynamo ─▶ capture ─▶ functionalize, slice ─▶ AOTAutograd ─▶ joint passes ─▶ partition
           ─▶ schedule, legalize ─▶ run

The first, static compile is restarted with the sizes of the data symbolic, so that one program
serves every batch and its decisions know no local size (docs/adr/0003).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import default_partition
from torch import fx
from torch._dynamo import exc as dynamo_exc
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen

from overlap import capture, collectives, compilation, cost, graph, presets, repeat, simulate
from overlap.checking import Checked
from overlap.compilation import Compilation
from overlap.config import Config
from overlap.errors import PassError
from overlap.hardware import Profile
from overlap.passes.recompute import Policies
from overlap.passes.schedule import MemoryCap, Scheduled
from overlap.passes.slice import Sliced
from overlap.pipeline import Context, run
from overlap.repeat import More
from overlap.runtime import agree, detect, groups

_FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")


def overlap(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Any = None) -> Any:
    """The backend behind `torch.compile(model, backend="overlap", options={...})`.

    Raises ConfigError for wrong options, PassError for a refused overlap under `strict`. What it
    returns raises DivergenceError if another rank decided otherwise about the program.
    """
    config = Config.from_options(options)
    if os.environ.get("OVERLAP_DISABLE") == "1":
        return as_written(gm, example_inputs)
    _restart_with_symbolic_sizes(gm, example_inputs)
    _unify_sizes(gm)
    began = time.perf_counter()
    record = Compilation.begin(config, example_inputs, agree.structure_of(gm))
    compiled = _compile(gm, example_inputs, record)
    record.compile_s = time.perf_counter() - began
    if config.check_steps:
        reference = as_written(gm, example_inputs)
        return Checked(compiled, reference, config.check_steps)
    return compiled


class Unrolled(BaseException):
    """The graphs of a deeper program were compiled; the one that was captured does not run."""


def compile_deeper(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: Config, more: More
) -> None:
    """Compile the program that has more of the equal layers that `gm` repeats, and raise Unrolled
    when that is done. Raises PassError if the graphs of `gm` do not repeat."""
    _unify_sizes(gm)
    began = time.perf_counter()
    record = Compilation.begin(config, example_inputs, agree.structure_of(gm))
    try:
        _compile(gm, example_inputs, record, more)
    finally:
        record.compile_s = time.perf_counter() - began
    raise PassError("a deeper program needs slices and a backward; this one has none")


def as_written(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The un-sliced, un-scheduled program through the same kernels: the referee."""
    return _through_autograd(gm, example_inputs, lambda kind, gm, _: _boxed_callable(gm))


def set_dynamo_flags() -> None:
    """Let Dynamo capture host reads and data-dependent sizes, which routed exchanges need. Says so
    once; `OVERLAP_NO_DYNAMO_FLAGS=1` turns it off."""
    if os.environ.get("OVERLAP_NO_DYNAMO_FLAGS") == "1":
        return
    unset = [flag for flag in _FLAGS if not getattr(torch._dynamo.config, flag)]
    for flag in unset:
        setattr(torch._dynamo.config, flag, True)
    if unset:
        compilation.LOG.info(
            "set torch._dynamo.config.%s so that host reads break no graph; "
            "OVERLAP_NO_DYNAMO_FLAGS=1 turns that off",
            " and ".join(unset),
        )


set_dynamo_flags()


def mark_sizes_dynamic(inputs: Sequence[Any]) -> None:
    """Have the first capture make the sizes of the data symbolic, where no restart is needed."""
    for value in inputs:
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if _may_become_symbolic(value, dim, size):
                torch._dynamo.maybe_mark_dynamic(value, dim)


def _restart_with_symbolic_sizes(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Mark every size of the data dynamic and have Dynamo capture again, once per input.

    Source: TensorifyScalarRestartAnalysis is the one exception that Dynamo re-raises from a
    backend (torch 2.13, torch/_dynamo/output_graph.py). Without it sizes stay static, which
    slicing handles through placements.
    """
    restart = getattr(dynamo_exc, "TensorifyScalarRestartAnalysis", None)
    if restart is None:
        return
    marked = False
    for node, value in zip(graph.placeholders(gm.graph), example_inputs, strict=True):
        if not isinstance(value, torch.Tensor) or graph.is_module_state(node):
            continue
        for dim, size in enumerate(graph.fake_value(node).shape):
            if _may_become_symbolic(value, dim, size):
                torch._dynamo.maybe_mark_dynamic(value, dim)
                marked = True
    if marked:
        raise restart(restart_reason="overlap: sizes of the data become symbolic")


def _unify_sizes(gm: fx.GraphModule) -> None:
    """Give equal sizes of the data one symbol, dim by dim, as Dynamo does for sizes that it makes
    dynamic itself: inputs and labels share their batch. Comparing two symbols guards on it."""
    first: dict[tuple[int, int], torch.SymInt] = {}
    for node in graph.placeholders(gm.graph):
        value = graph.fake_value(node)
        if not isinstance(value, torch.Tensor) or graph.is_module_state(node):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and size.node.has_hint():
                other = first.setdefault((dim, size.node.hint), size)
                assert other == size


def _may_become_symbolic(value: torch.Tensor, dim: int, size: int | torch.SymInt) -> bool:
    tried = getattr(value, "_dynamo_weak_dynamic_indices", set())
    chosen = getattr(value, "_dynamo_static_indices", set())
    return isinstance(size, int) and size > 1 and dim not in tried and dim not in chosen


@dataclasses.dataclass
class _Session:
    """One compilation: what its passes share, from the forward to the backward graph."""

    record: Compilation
    ctx: Context
    preset: presets.Preset

    def bind_sizes(self, gm: fx.GraphModule) -> None:
        """Fix the nominal sizes by the graph that shows most: the joint one, or the only one."""
        self.ctx.provide(cost.nominal_sizes(gm, self.ctx.fact(Profile).nominal_size))

    def final(self, kind: str, gm: fx.GraphModule, cap_base_bytes: int) -> None:
        """Run the final passes over a graph that will run, and record what was decided."""
        config = self.record.config
        self.ctx.provide(MemoryCap(_cap_bytes(config.memory_budget, cap_base_bytes)))
        run(gm, self.preset.final, self.ctx)
        self.record.add_graph(kind, gm, self.ctx.take(Scheduled))


def _cap_bytes(budget: int | float | None, base_bytes: int) -> int | None:
    match budget:
        case None:
            return None
        case float():
            return int(budget * base_bytes)
        case _:
            return budget


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], record: Compilation, more: More | None = None
) -> Callable[..., Any]:
    ctx = Context(record.config, groups.size_of, remarks=record.remarks)
    profile = detect.profile(record.config.hardware, _device_of(example_inputs))
    record.profile = profile
    ctx.provide(profile)
    program, preset = _prepare(gm, ctx, record)
    session = _Session(record, ctx, preset)
    if preset is presets.NONE:
        return _through_autograd(
            gm, example_inputs, lambda kind, gm, _: _compared_callable(record, kind, gm)
        )
    return _through_autograd(
        program,
        example_inputs,
        functools.partial(_compile_graph, session),
        functools.partial(_partition_deeper, session, more)
        if more
        else functools.partial(_partition, session),
    )


def _through_autograd(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compiler: Callable[[str, fx.GraphModule, Any], Callable[..., Any]],
    partition: Callable[..., Any] = default_partition,
) -> Callable[..., Any]:
    """Let AOTAutograd derive the graphs that run; `compiler` gets the kind of each."""
    return aot_autograd(
        fw_compiler=functools.partial(compiler, "forward"),
        bw_compiler=functools.partial(compiler, "backward"),
        inference_compiler=functools.partial(compiler, "inference"),
        partition_fn=partition,
    )(gm, example_inputs)


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _prepare(
    gm: fx.GraphModule, ctx: Context, record: Compilation
) -> tuple[fx.GraphModule, presets.Preset]:
    """The program that goes to autograd, sliced where it may be, and the passes after it."""
    config = record.config
    if config.preset == "none":
        ctx.remark("note", "preset='none' leaves the program as it is")
        return gm, presets.NONE
    try:
        captured = capture.to_aten(gm)
    except capture.CaptureError as error:
        ctx.provide(Policies({}))
        ctx.remark("refused", f"nothing is sliced: {error}")
        return gm, presets.moe(slices=1)
    ctx.provide(Policies(captured.policies))
    if not collectives.has_collective(captured.gm):
        ctx.remark("note", "the program has no collective, so there is nothing to hide")
        return gm, presets.NONE
    slices = compilation.decide_slices(captured.gm, record, ctx.group_size)
    record.slices = slices
    record.axis = "batch" if config.axis == "auto" else config.axis
    preset = presets.moe(slices, record.axis)
    run(captured.gm, preset.forward, ctx)
    if sliced := ctx.fact_or_none(Sliced):
        record.sliced_starts, record.reassociated = sliced.starts, sliced.reassociated
    return captured.gm, preset


def _partition(
    session: _Session, joint_gm: fx.GraphModule, joint_inputs: Any, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    parts = _parts_of(session, joint_gm, joint_inputs, **options)
    session.record.base_peak_bytes = max(_program_order_peak(session, part) for part in parts)
    return parts


def _parts_of(
    session: _Session, joint_gm: fx.GraphModule, joint_inputs: Any, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    graph.set_phase(joint_gm, graph.Phase.JOINT)
    run(joint_gm, session.preset.joint, session.ctx)
    session.bind_sizes(joint_gm)
    parts = default_partition(joint_gm, joint_inputs, **options)
    for part in parts:
        graph.set_phase(part, graph.Phase.NORMALIZED)
    return parts


def _partition_deeper(
    session: _Session, more: More, joint_gm: fx.GraphModule, joint_inputs: Any, **options: Any
) -> Any:
    """Compile the graphs of the program with more layers. AOTAutograd knows nothing of
    those layers, so it is left at once."""
    parts = _parts_of(session, joint_gm, joint_inputs, **options)
    repeat.unroll(*parts, options["num_fwd_outputs"], more)
    session.record.base_peak_bytes = max(_program_order_peak(session, part) for part in parts)
    for kind, part in zip(("forward", "backward"), parts, strict=True):
        session.final(kind, part, session.record.base_peak_bytes)
    raise Unrolled


def _program_order_peak(session: _Session, gm: fx.GraphModule) -> int:
    """Peak bytes in program order, saved activations counted, parameters not."""
    ctx = session.ctx
    costs = cost.estimate(gm, ctx.fact(Profile), ctx.group_size, ctx.fact(cost.Sizes))
    program = simulate.extract(gm, costs)
    return simulate.peak_memory(program, range(len(program)))[0]


def _compile_graph(
    session: _Session, kind: str, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    if kind == "inference":
        graph.set_phase(gm, graph.Phase.JOINT)
        run(gm, session.preset.inference, session.ctx)
        session.bind_sizes(gm)
        session.record.base_peak_bytes = _program_order_peak(session, gm)
    session.final(kind, gm, session.record.base_peak_bytes)
    return _compared_callable(session.record, kind, gm)


def _compared_callable(record: Compilation, kind: str, gm: fx.GraphModule) -> Callable[..., Any]:
    """The graph as a callable; before its first run the ranks compare what they decided about it.

    Not while it is compiled: AOTAutograd puts off a backward whose compiler raises, and a graph
    that one rank compiles and never runs is nothing that others could differ from.
    """
    run_graph = _boxed_callable(gm)
    starts = compilation.collectives_of(gm)
    if not starts:
        return run_graph
    compare_once = functools.cache(functools.partial(record.compare_ranks, kind, starts))

    def compared(inputs: list[Any]) -> Any:
        compare_once()
        return run_graph(inputs)

    return _boxed(compared)


def _boxed_callable(gm: fx.GraphModule) -> Callable[..., Any]:
    """The nodes in their order, as Python that frees inputs and values at their last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    _boxed(gm.forward.__func__)  # pyright: ignore[reportFunctionMemberAccess]
    return gm.forward


def _boxed(function: Any) -> Any:
    """Mark a function that takes its inputs as one list, which it may empty."""
    function._boxed_call = True
    return function
