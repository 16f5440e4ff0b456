"""The torch.compile backend: Dynamo's graph in, a callable out.

    Dynamo ─▶ capture ─▶ functionalize, slice ─▶ AOTAutograd ─▶ joint passes ─▶ partition
           ─▶ schedule, legalize ─▶ runs of compute to Inductor, if asked for ─▶ run

With `whole_step`, the two graphs of the partition are joined before they are scheduled.

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

from overlap import (
    capture,
    certificate,
    collectives,
    compilation,
    cost,
    cost_table,
    graph,
    presets,
    pricing,
    repeat,
    simulate,
    whole_step,
)
from overlap.checking import Checked
from overlap.choose import Choice
from overlap.compilation import Compilation
from overlap.config import Config
from overlap.cost_table import CostTable
from overlap.errors import PassError
from overlap.hardware import Profile
from overlap.inner.runs import Compiled, Compiler, Inner, eager
from overlap.passes.merge_wgrad import Inexact
from overlap.passes.recompute import Policies
from overlap.passes.schedule import MemoryCap, Scheduled
from overlap.passes.slice import Sliced
from overlap.pipeline import Context, Remark, run
from overlap.repeat import More
from overlap.runtime import agree, detect, groups

Runner = Callable[[fx.GraphModule], Callable[..., Any]]
"""Makes a callable of a graph in its final order: takes its inputs as one list and empties it."""

_FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")


def overlap(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Any = None) -> Any:
    """The backend behind `torch.compile(model, backend="overlap", options={...})`.

    Raises ConfigError for wrong options, PassError for a refused overlap under `strict`. What it
    returns raises DivergenceError if another rank decided otherwise about the program.
    """
    return compile_with(Config.from_options(options), boxed_callable, gm, example_inputs)


def compile_with(
    config: Config,
    runner: Runner,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    """What the backend does under `config`; `runner` makes a callable of each graph that runs."""
    is_exact = config.numerics == "exact"
    inner = "eager" if is_exact else detect.inner(config.inner, _device_of(example_inputs))
    is_disabled = os.environ.get("OVERLAP_DISABLE") == "1"
    if inner == "inductor" and not _communicates(gm):
        if not is_disabled:
            _record_alone(config, gm, example_inputs)
        return _inductor().compile_program(gm, example_inputs)
    if is_disabled:
        return as_written(gm, example_inputs, _Kernels.of(inner, Context(config, groups.size_of)))
    _restart_with_symbolic_sizes(gm, example_inputs)
    _unify_sizes(gm)
    began = time.perf_counter()
    names = agree.structure_of(gm), agree.program_of(gm)
    record = Compilation.begin(config, example_inputs, *names)
    record.inner = inner
    ctx = Context(config, groups.size_of, remarks=record.remarks, runs=record.runs)
    kernels = _Kernels.of(inner, ctx)
    compiled = _compile(gm, example_inputs, _Session(record, ctx, kernels, runner))
    record.compile_s = time.perf_counter() - began
    if config.check_steps:
        reference = as_written(gm, example_inputs, kernels)
        return Checked(compiled, reference, config.check_steps, record.is_exact)
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
    record = Compilation.begin(config, example_inputs, agree.structure_of(gm), agree.program_of(gm))
    ctx = Context(config, groups.size_of, remarks=record.remarks, runs=record.runs)
    session = _Session(record, ctx, _Kernels(eager, ctx), boxed_callable, more=more)
    try:
        _compile(gm, example_inputs, session)
    finally:
        record.compile_s = time.perf_counter() - began
    raise PassError("a deeper program needs slices and a backward; this one has none")


def as_written(
    gm: fx.GraphModule, example_inputs: Sequence[Any], kernels: _Kernels | None = None
) -> Callable[..., Any]:
    """The un-sliced, un-scheduled program through the same kernels, by default eager ones: the
    referee."""

    def compile_graph(kind: str, gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return boxed_callable(kernels.of_graph(kind, gm).gm if kernels else gm)

    return _through_autograd(gm, example_inputs, compile_graph)


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """Who generates the kernels of the graphs of one program."""

    inner: Inner
    ctx: Context

    @classmethod
    def of(cls, inner: str, ctx: Context) -> _Kernels:
        compiles = inner == "inductor"
        return cls(Compiler(_inductor().compile_run).compile if compiles else eager, ctx)

    def of_graph(self, kind: str, gm: fx.GraphModule) -> Compiled:
        """What runs; under `strict`, a PassError for a run that Inductor did not compile."""
        compiled = self.inner(kind, gm)
        for one in compiled.failures:
            self.ctx.remark(
                "refused",
                f"the {kind}'s run {one.first.name}..{one.last.name} stays eager, since Inductor "
                f"does not compile it: {one.reason}",
                node=one.first,
                advice="see that torch.compile(backend='inductor') works, or set inner='eager'",
            )
        return compiled


def _inductor() -> Any:
    """Loaded when it is asked for: that takes a second."""
    from overlap.inner import inductor

    return inductor


def _communicates(gm: fx.GraphModule) -> bool:
    """Whether a program has a collective, as far as can be told: True where it does not trace."""
    if collectives.has_collective(gm):
        return True
    try:
        return collectives.has_collective(capture.to_aten(gm).gm)
    except capture.CaptureError:
        return True


def _record_alone(config: Config, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    record = Compilation.begin(config, example_inputs, agree.structure_of(gm))
    record.inner = "inductor"
    record.profile = detect.profile(config.hardware, _device_of(example_inputs))
    text = "the program has no collective, so there is nothing to hide: Inductor compiles it whole"
    record.remarks.append(Remark("", "note", text))


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
    """One compilation: what its passes share, from the forward to the backward graph.

    captured: the forward as it was sliced, None where it could not be captured.
    more: equal layers that the program has and that were not captured.
    """

    record: Compilation
    ctx: Context
    kernels: _Kernels
    runner: Runner
    preset: presets.Preset = presets.NONE
    captured: fx.GraphModule | None = None
    more: More | None = None

    def bind_sizes(self, gm: fx.GraphModule) -> None:
        """Fix the nominal sizes by the graph that shows most: the joint one, or the only one."""
        profile, table = self.ctx.fact(Profile), self.ctx.fact_or_none(CostTable)
        self.ctx.provide(pricing.sizes_of(gm, profile, table, self.record.skew))
        self.record.local_sizes = cost.local_sizes(gm, profile.nominal_size)

    def final(self, kind: str, gm: fx.GraphModule, cap_base_bytes: int) -> None:
        """Run the final passes over a graph that will run, and record what was decided."""
        config = self.record.config
        # That a scaling of gradients hides nothing is nothing to remark.
        ctx = dataclasses.replace(self.ctx, remarks=[]) if kind == "scale" else self.ctx
        ctx.provide(MemoryCap(_cap_bytes(config.memory_budget, cap_base_bytes)))
        run(gm, self.preset.final, ctx)
        self.record.add_graph(kind, gm, ctx.take(Scheduled), ctx.group_size)


def _cap_bytes(budget: int | float | None, base_bytes: int) -> int | None:
    match budget:
        case None:
            return None
        case float():
            return int(budget * base_bytes)
        case _:
            return budget


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], session: _Session
) -> Callable[..., Any]:
    record, ctx = session.record, session.ctx
    device = _device_of(example_inputs)
    profile = detect.profile(record.config.hardware, device)
    record.profile = profile
    ctx.provide(profile)
    if record.config.costs is not None:
        record.table = cost_table.load(record.config.costs)
    if record.is_exact:
        record.certificate = certificate.load(device)
        ctx.provide(record.certificate)
    try:
        return _compile_sliced(gm, example_inputs, session)
    except _NotExact as error:
        if record.config.strict:
            raise PassError(str(error)) from error
        ctx.running = "merge_wgrad"
        ctx.remark("refused", f"nothing is sliced: {error}", advice="use numerics='reassociate'")
        ctx.running = ""
    record.choice, record.sliced_starts = Choice(record.axis, 1), ()
    record.graphs.clear()
    return _compile_sliced(gm, example_inputs, session)


class _NotExact(Exception):
    """What autograd made of the slices adds up in another order than the program as written."""


def _compile_sliced(
    gm: fx.GraphModule, example_inputs: Sequence[Any], session: _Session
) -> Callable[..., Any]:
    program, session.preset = _prepare(gm, session.ctx, session.record)
    session.captured = program if program is not gm else None
    if session.preset is presets.NONE:
        return _through_autograd(
            gm, example_inputs, lambda kind, gm, _: _compared_callable(session, kind, gm)
        )
    return _through_autograd(
        program,
        example_inputs,
        functools.partial(_compile_graph, session),
        functools.partial(_partition_deeper if session.more else _partition, session),
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
        _use_table(gm, ctx, record)
        ctx.remark("refused", f"nothing is sliced: {error}")
        return gm, presets.moe(slices=1, exact=record.is_exact)
    ctx.provide(Policies(captured.policies))
    if not collectives.has_collective(captured.gm):
        ctx.remark("note", "the program has no collective, so there is nothing to hide")
        return gm, presets.NONE
    _use_table(captured.gm, ctx, record)
    run(captured.gm, presets.prepare(config.whole_step and config.slices != 1), ctx)
    if record.choice is None:
        record.choice = compilation.decide(captured.gm, record, ctx.group_size)
    choice = record.choice
    record.slices, record.axis = choice.slices, choice.axis
    if choice.reason:
        ctx.remark("note", choice.reason, advice="slices=2 slices it all the same")
    preset = presets.moe(choice.slices, choice.axis, config.whole_step, record.is_exact)
    run(captured.gm, preset.forward, ctx)
    if sliced := ctx.fact_or_none(Sliced):
        record.sliced_starts, record.reassociated = sliced.starts, sliced.reassociated
        record.axes = sliced.axes
    return captured.gm, preset


def _use_table(gm: fx.GraphModule, ctx: Context, record: Compilation) -> None:
    """Price by the cost table, if there is one. Raises ConfigError if it is for something else."""
    if record.table is None:
        return
    assert record.config.costs is not None
    axis = record.config.axis
    record.axis = record.table.axis if axis == "auto" else axis
    inputs = [graph.fake_value(node) for node in graph.placeholders(gm.graph)]
    here = detect.known_place(_device_of(inputs))
    record.table.check(record.config.costs, here, record.program, record.axis)
    ctx.provide(record.table)


def _partition(
    session: _Session, joint_gm: fx.GraphModule, joint_inputs: Any, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    parts = _parts_of(session, joint_gm, joint_inputs, **options)
    return _finished(session, parts, options["num_fwd_outputs"])


def _finished(session: _Session, parts: whole_step.Parts, num_outputs: int) -> whole_step.Parts:
    """The graphs that are to be scheduled."""
    parts = _joined(session, parts, num_outputs)
    for part in parts:
        graph.set_phase(part, graph.Phase.NORMALIZED)
    session.record.base_peak_bytes = max(_program_order_peak(session, part) for part in parts)
    return parts


def _parts_of(
    session: _Session, joint_gm: fx.GraphModule, joint_inputs: Any, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    graph.set_phase(joint_gm, graph.Phase.JOINT)
    run(joint_gm, session.preset.joint, session.ctx)
    if inexact := session.ctx.take(Inexact):
        raise _NotExact(
            f"{', '.join(inexact.nodes[:3])} of the backward would add up what several slices "
            "computed, or lie otherwise in memory than in the program as written "
            "(numerics='exact')"
        )
    session.bind_sizes(joint_gm)
    return default_partition(joint_gm, joint_inputs, **options)


def _partition_deeper(
    session: _Session, joint_gm: fx.GraphModule, joint_inputs: Any, **options: Any
) -> Any:
    """Compile the graphs of the program with more layers. AOTAutograd knows nothing of those
    layers, so it is left at once."""
    assert session.more is not None
    parts = _parts_of(session, joint_gm, joint_inputs, **options)
    num_outputs = repeat.unroll(*parts, options["num_fwd_outputs"], session.more)
    parts = _finished(session, parts, num_outputs)
    is_whole = session.record.is_whole_step
    for kind, part in zip(
        ("step", "scale") if is_whole else ("forward", "backward"), parts, strict=True
    ):
        session.final(kind, part, session.record.base_peak_bytes)
    raise Unrolled


def _joined(session: _Session, parts: whole_step.Parts, num_outputs: int) -> whole_step.Parts:
    """The parts as one step and its scaling, where that is asked for and may be."""
    record, ctx = session.record, session.ctx
    try:
        if session.captured is None:
            raise whole_step.Refused(
                "what does not trace may have a backward that is not linear",
                "see the remark before",
            )
        whole_step.check_operators(session.captured)
        whole_step.check_parts(parts, num_outputs)
    except whole_step.Refused as refused:
        if record.config.whole_step:
            text = f"forward and backward stay two graphs: {refused.reason}"
            ctx.remark("refused", text, advice=refused.advice)
        return parts
    if not record.config.whole_step:
        ctx.remark("note", "one graph for forward and backward, whole_step=True, may hide more")
        return parts
    record.is_whole_step = True
    step, scale = whole_step.join(parts, num_outputs, ctx.group_size)
    if meeting := whole_step.meeting(step):
        ctx.remark(
            "skipped",
            "waits for all slices, so none begins its backward while others are in their forward",
            meeting,
            "sum up a loss per row, in fp32"
            if record.axis == "batch"
            else f"axis='batch' keeps slices apart where axis={record.axis!r} joins them",
        )
    return step, scale


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
    if session.record.is_whole_step:
        kind = {"forward": "step", "backward": "scale"}.get(kind, kind)
    session.final(kind, gm, session.record.base_peak_bytes)
    return _compared_callable(session, kind, gm)


def _compared_callable(session: _Session, kind: str, gm: fx.GraphModule) -> Callable[..., Any]:
    """The graph as a callable; before its first run the ranks compare what they decided about it.

    Not while it is compiled: AOTAutograd puts off a backward whose compiler raises, and a graph
    that one rank compiles and never runs is nothing that others could differ from.
    """
    compiled = session.kernels.of_graph(kind, gm)
    session.record.compiled.append(compiled)
    run_graph = session.runner(compiled.gm)
    starts = compilation.collectives_of(gm)
    if not starts:
        return run_graph
    compare_once = functools.cache(
        functools.partial(session.record.compare_ranks, kind, starts, compiled)
    )

    def compared(inputs: list[Any]) -> Any:
        compare_once()
        return run_graph(inputs)

    return boxed(compared)


def boxed_callable(gm: fx.GraphModule) -> Callable[..., Any]:
    """The nodes in their order, as Python that frees inputs and values at their last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    # A function of its own: `gm.forward` may be one that all lazily compiled modules share.
    return boxed(lambda inputs: gm.forward(inputs))


def boxed(function: Any) -> Any:
    """Mark a function that takes its inputs as one list, which it may empty."""
    function._boxed_call = True
    return function
