"""The demo: local ranks train a mixture of experts over an emulated link, with and without overlap.

Copies of one model with the same weights take turns, in blocks of steps on the same batches:

    round 0   eager eager ..  | overlap overlap ..  | overlap, 1 slice ..
    round 1   overlap ..      | overlap, 1 slice .. | eager ..             the order rotates

A step is forward, backward, averaging of gradients, optimizer. What is compared is whole steps;
what communication costs and how much of it is hidden comes from the link's own records. Gradients
are averaged over a plain gloo group beside the link: they are no part of the compiled program.

The model and its text are targets, found by name as those of a user are.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from overlap import cost_table, report, target
from overlap.config import Config
from overlap.errors import ConfigError
from overlap.report import MeasuredStep, Report
from overlap.runtime import fake, link, link_group, memory
from overlap.runtime.launch import LaunchOptions, launch
from overlap.target import MeshSpec

TARGET = "models.deepseek_v3:train_step"
TEXT = "models.text:batches"
EAGER, OVERLAP, UNSLICED = "eager", "overlap", "overlap, 1 slice"
BLOCK_STEPS = 4
UNTIMED_STEPS = 16  # the first compiles, the second measures memory; then routing settles
HELDOUT_BATCHES = 4
RANK_ENV = {
    "MKL_CBWR": "AVX512,STRICT",  # products of fewer rows round as those of more
    "KINETO_LOG_LEVEL": "99",  # the profiler that measures memory is quiet
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """What the demo runs.

    link_mbit: bandwidth of the emulated link, in 10^6 bits per second each way.
    steps: timed steps of each variant, rounded up to whole blocks.
    config: of the target.
    costs: path of a cost table for the compiled variants, None for the profile's formulas.
    """

    link_mbit: float = 200.0
    num_ranks: int = 2
    slices: int | str = "auto"
    steps: int = 44
    config: str = "demo"
    costs: str | None = None

    def __post_init__(self) -> None:
        link.LinkConfig(self.link_mbit)
        Config(slices=self.slices, costs=self.costs)
        if self.costs is not None:
            cost_table.load(self.costs)
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps!r}; expected at least 1")
        if self.num_ranks < 1:
            raise ConfigError(f"ranks is {self.num_ranks!r}; expected at least 1")

    @property
    def num_rounds(self) -> int:
        return math.ceil(self.steps / BLOCK_STEPS)


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """One timed step on one rank, in milliseconds; `hidden` from 0 to 1, 0 if nothing was sent.
    graphs_ms: its forward and backward, the part that is compiled."""

    step_ms: float
    graphs_ms: float
    comm_ms: float
    exposed_ms: float
    hidden: float


@dataclasses.dataclass
class VariantRun:
    """What one rank saw of one variant.

    losses: of every step, the untimed ones too. compile_s: the first step, less a usual one.
    measured: one step, close to the median, as the link saw it. predicted_ms: forward and backward;
    None where nothing was compiled.
    """

    figures: list[StepFigures] = dataclasses.field(default_factory=list[StepFigures])
    losses: list[float] = dataclasses.field(default_factory=list[float])
    compile_s: float = 0.0
    peak_bytes: int = 0
    heldout_loss: float = math.nan
    measured: MeasuredStep | None = None
    predicted_ms: float | None = None


@dataclasses.dataclass(frozen=True)
class RankRun:
    variants: dict[str, VariantRun]
    report: Report | None


@dataclasses.dataclass(frozen=True)
class Spread:
    """A figure over many steps."""

    min: float
    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(*[values[0]] * 4)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(min(values), q1, median, q3)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the table. Times in milliseconds, per step, averaged over the ranks but for
    `step_ms`, which is that of the slowest rank. num_equal_losses: how many first losses were
    bitwise equal to eager's on all ranks. graphs_ms: forward and backward of the slowest rank;
    predicted_ms: the same, predicted."""

    name: str
    step_ms: Spread
    graphs_ms: Spread
    predicted_ms: float | None
    comm_ms: Spread
    exposed_ms: Spread
    hidden: float
    max_loss_diff: float
    first_loss_diff: float
    num_equal_losses: int
    heldout_loss: float
    peak_bytes: int
    compile_s: float
    speedup: Spread


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    slices: how many slices the variant `overlap` runs.
    measured: for the timelines, one step of `eager` and one of `overlap` on rank 0.
    report: of the variant `overlap`, None where nothing was compiled.
    """

    options: DemoOptions
    variants: tuple[Variant, ...]
    slices: int
    numerics: str
    measured: Mapping[str, MeasuredStep]
    report: Report | None

    @property
    def num_steps(self) -> int:
        """Timed steps of all variants."""
        return len(self.variants) * self.options.num_rounds * BLOCK_STEPS

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def to_json(self) -> dict[str, Any]:
        overlap = self.variant(OVERLAP)
        return {
            EAGER: _figures_json(self.variant(EAGER)),
            OVERLAP: _figures_json(overlap),
            "overlap_1_slice": _figures_json(self.variant(UNSLICED)),
            "speedup": overlap.speedup.median,
            "max_loss_diff": overlap.max_loss_diff,
            "slices": self.slices,
            "numerics": self.numerics,
            "peak_bytes": overlap.peak_bytes,
            "link": {"kind": "emulated", "mbit": self.options.link_mbit},
            "ranks": self.options.num_ranks,
            "steps": self.num_steps,
        }


def _figures_json(variant: Variant) -> dict[str, Any]:
    def spread(value: Spread) -> dict[str, float]:
        return {"min": value.min, "q1": value.q1, "median": value.median}

    return {
        "step_ms": spread(variant.step_ms),
        "forward_backward_ms": spread(variant.graphs_ms),
        "predicted_ms": variant.predicted_ms,
        "comm_ms": spread(variant.comm_ms),
        "exposed_ms": spread(variant.exposed_ms),
        "hidden": variant.hidden,
        "speedup": dataclasses.asdict(variant.speedup),
        "max_loss_diff": variant.max_loss_diff,
        "first_loss_diff": variant.first_loss_diff,
        "num_equal_losses": variant.num_equal_losses,
        "heldout_loss": variant.heldout_loss,
        "peak_bytes": variant.peak_bytes,
        "compile_s": variant.compile_s,
    }


def run(options: DemoOptions) -> DemoResult:
    """Start the ranks, train, and sum up.

    Raises ConfigError before anything is started, RankError, naming it, if a rank fails.
    """
    with fake.world(options.num_ranks):  # what does not fit is said here, and once
        target.make_step(TARGET, options.config, MeshSpec.of_world(options.num_ranks))
    launched = LaunchOptions(num_ranks=options.num_ranks, env=RANK_ENV)
    return summarize(options, launch(train, options, options=launched))


# ---- on the ranks -------------------------------------------------------------------------------


def train(options: DemoOptions) -> RankRun:
    """All of the training of one rank."""
    torch.set_num_threads(1)
    link_group.register(link.LinkConfig(options.link_mbit))
    dist.init_process_group(link_group.EMULATED)
    try:
        return _Trainer(options).run()
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass
class _Copy:
    """One variant: a copy of the model, how it is called, and what was seen of it."""

    name: str
    module: nn.Module
    compiled: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    seen: VariantRun
    batches: Iterator[tuple[Tensor, Tensor]]


class _Trainer:
    """Trains the copies in turn. `plain` is a gloo group of all ranks, beside the link."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.plain: Any = dist.new_group(backend="gloo")
        self.copies = [self._copy(name) for name in (EAGER, OVERLAP, UNSLICED)]
        self.is_shared = self._find_shared(self.copies[0].module)
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=self.rank != 0,
        )

    def _copy(self, name: str) -> _Copy:
        mesh = MeshSpec.of_world(self.world)
        step = target.make_step(TARGET, self.options.config, mesh)
        assert step.optimizer is not None
        batch, seq = step.example_inputs[0].shape
        module = step.loss_module()
        compiled: Any = module
        if name != EAGER:
            slices = 1 if name == UNSLICED else self.options.slices
            options: Any = {"slices": slices, "axis": "batch", "costs": self.options.costs}
            compiled = torch.compile(module, backend="overlap", options=options)
        make_batches = target.load(TEXT)
        batches = make_batches("train", batch, seq, rank=self.rank, world=self.world)
        return _Copy(name, module, compiled, step.optimizer, VariantRun(), batches)

    def _find_shared(self, module: nn.Module) -> list[bool]:
        """For each parameter, whether it starts equal on all ranks: then they are replicas."""
        sums = torch.stack([p.detach().double().sum() for p in module.parameters()])
        of_ranks = [torch.empty_like(sums) for _ in range(self.world)]
        dist.all_gather(of_ranks, sums, group=self.plain)
        return [bool((values == values[0]).all()) for values in torch.stack(of_ranks, dim=1)]

    def run(self) -> RankRun:
        with self.progress:
            for one in self.copies:
                self._prepare(one)
            # What compilation left stays out of the collector's way, for all copies alike.
            gc.collect()
            gc.freeze()
            self._take_turns()
            for one in self.copies:
                one.seen.heldout_loss = self._heldout_loss(one.module)
        reports = {
            one.name: report.explain(one.compiled) for one in self.copies if one.name != EAGER
        }
        for one in self.copies:
            if one.name in reports and reports[one.name].graphs:
                one.seen.predicted_ms = reports[one.name].predicted_us / 1e3
        found = reports[OVERLAP] if self.rank == 0 else None
        return RankRun({one.name: one.seen for one in self.copies}, found)

    def _prepare(self, one: _Copy) -> None:
        """The untimed steps: the first one compiles, the second one measures memory."""
        what = "training" if one.name == EAGER else "compiling"
        shown = self.progress.add_task(f"{what}: {one.name}", total=UNTIMED_STEPS)
        if not self.progress.console.is_terminal and self.rank == 0:
            self.progress.console.print(f"{what}: {one.name}")
        times_s: list[float] = []
        for index in range(UNTIMED_STEPS):
            began = time.monotonic()
            if index == 1:
                one.seen.peak_bytes = memory.peak_bytes(functools.partial(self._step, one))
            else:
                self._step(one)
            times_s.append(time.monotonic() - began)
            self.progress.advance(shown)
        one.seen.compile_s = max(0.0, times_s[0] - times_s[-1])
        self.progress.remove_task(shown)

    def _take_turns(self) -> None:
        num_steps = len(self.copies) * self.options.num_rounds * BLOCK_STEPS
        shown = self.progress.add_task("training, the copies in turn", total=num_steps)
        rotation = itertools.cycle(range(len(self.copies)))
        for first in itertools.islice(rotation, self.options.num_rounds):
            for one in self.copies[first:] + self.copies[:first]:
                dist.barrier(group=self.plain)
                for _ in range(BLOCK_STEPS):
                    measured = self._step(one)
                    one.seen.figures.append(_figures(measured))
                    _keep_typical(one.seen, measured)
                    self.progress.advance(shown)

    def _step(self, one: _Copy) -> MeasuredStep:
        tokens, labels = next(one.batches)
        began = time.monotonic()
        with link.process_link().record() as recording:
            loss = one.compiled(tokens, labels)
            forward_end = time.monotonic()
            loss.backward()
            backward_end = time.monotonic()
        self._average_gradients(one.module)
        one.optimizer.step()
        one.optimizer.zero_grad()
        ended = time.monotonic()
        one.seen.losses.append(loss.item())
        return report.measured_step(
            recording, began, forward=forward_end, backward=backward_end, optimizer=ended
        )

    def _average_gradients(self, module: nn.Module) -> None:
        """The loss is the mean over all ranks' rows. An expert has seen the rows of all ranks;
        replicas have seen their own, and add up."""
        if self.world == 1:
            return
        parameters = list(module.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_div_(gradients, self.world)
        shared = [
            p.grad
            for p, is_shared in zip(parameters, self.is_shared, strict=True)
            if is_shared and p.grad is not None
        ]
        flat = torch.cat([gradient.flatten() for gradient in shared])
        dist.all_reduce(flat, group=self.plain)
        pieces = flat.split([gradient.numel() for gradient in shared])
        torch._foreach_copy_(shared, [p.view_as(g) for p, g in zip(pieces, shared, strict=True)])

    @torch.no_grad()
    def _heldout_loss(self, module: nn.Module) -> float:
        """Mean over a few held-out batches of all ranks; the model as written, with its weights."""
        batch, seq = next(self.copies[0].batches)[0].shape
        batches = target.load(TEXT)("heldout", batch, seq, rank=self.rank, world=self.world)
        module.eval()
        losses = [module(*inputs) for inputs in itertools.islice(batches, HELDOUT_BATCHES)]
        loss = torch.stack(losses).mean()
        dist.all_reduce(loss, group=self.plain)
        return loss.item() / self.world


def _figures(step: MeasuredStep) -> StepFigures:
    return StepFigures(
        step_ms=step.length_us / 1e3,
        graphs_ms=(step.graphs_us or 0.0) / 1e3,
        comm_ms=step.comm_us / 1e3,
        exposed_ms=step.exposed_us / 1e3,
        hidden=step.hidden,
    )


def _keep_typical(seen: VariantRun, measured: MeasuredStep) -> None:
    """Keep the step whose length is closest to the median so far."""
    median_ms = statistics.median(figures.step_ms for figures in seen.figures)

    def distance(step: MeasuredStep) -> float:
        return abs(step.length_us / 1e3 - median_ms)

    if seen.measured is None or distance(measured) <= distance(seen.measured):
        seen.measured = measured


# ---- summing up ---------------------------------------------------------------------------------


def summarize(options: DemoOptions, ranks: Sequence[RankRun]) -> DemoResult:
    """Put together what the ranks saw."""
    eager = [rank.variants[EAGER] for rank in ranks]
    variants = tuple(
        _summarize_variant(name, [rank.variants[name] for rank in ranks], eager)
        for name in ranks[0].variants
    )
    found = ranks[0].report
    measured = {
        name: run.measured for name, run in ranks[0].variants.items() if run.measured is not None
    }
    return DemoResult(
        options=options,
        variants=variants,
        slices=found.slices if found else 1,
        numerics=found.numerics if found else "reassociate",
        measured=measured,
        report=found,
    )


def _summarize_variant(
    name: str, runs: Sequence[VariantRun], eager: Sequence[VariantRun]
) -> Variant:
    def over_ranks(field: str, combine: Callable[[Sequence[float]], float]) -> list[float]:
        steps = zip(*(run.figures for run in runs), strict=True)
        return [combine([getattr(figures, field) for figures in step]) for step in steps]

    differences = [  # by step, the largest over the ranks
        max(abs(run.losses[i] - other.losses[i]) for run, other in zip(runs, eager, strict=True))
        for i in range(len(runs[0].losses))
    ]
    num_equal = next((i for i, d in enumerate(differences) if d), len(differences))
    return Variant(
        name=name,
        step_ms=Spread.of(over_ranks("step_ms", max)),
        graphs_ms=Spread.of(over_ranks("graphs_ms", max)),
        predicted_ms=runs[0].predicted_ms,
        comm_ms=Spread.of(over_ranks("comm_ms", statistics.fmean)),
        exposed_ms=Spread.of(over_ranks("exposed_ms", statistics.fmean)),
        hidden=statistics.median(over_ranks("hidden", statistics.fmean)),
        max_loss_diff=max(differences),
        first_loss_diff=differences[0],
        num_equal_losses=num_equal,
        heldout_loss=runs[0].heldout_loss,
        peak_bytes=max(run.peak_bytes for run in runs),
        compile_s=max(run.compile_s for run in runs),
        speedup=Spread.of(_paired_ratios(eager, runs)),
    )


def _paired_ratios(eager: Sequence[VariantRun], runs: Sequence[VariantRun]) -> list[float]:
    """Eager's time over the variant's, by round: both ran within seconds of each other."""
    return [a / b for a, b in zip(_block_medians(eager), _block_medians(runs), strict=True)]


def _block_medians(runs: Sequence[VariantRun]) -> list[float]:
    slowest = [
        max(f.step_ms for f in step) for step in zip(*(r.figures for r in runs), strict=True)
    ]
    blocks = range(0, len(slowest), BLOCK_STEPS)
    return [statistics.median(slowest[first : first + BLOCK_STEPS]) for first in blocks]
