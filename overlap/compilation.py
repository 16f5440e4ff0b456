"""What one compilation decided, kept for `overlap.explain` and for recompiles of the same code."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._guards import CompileContext

from overlap import certificate, collectives, graph, pricing, printing, simulate
from overlap.certificate import Certificate
from overlap.choose import Choice, best_slices, choose
from overlap.config import Config
from overlap.cost import Sizes, Sources
from overlap.cost_table import CostTable
from overlap.forecast import Setting
from overlap.hardware import Profile
from overlap.inner.runs import Compiled
from overlap.passes.schedule import Scheduled
from overlap.pipeline import Remark, Run
from overlap.runtime import agree
from overlap.simulate import Machine, Timeline

LOG = logging.getLogger("overlap")
GENERATED = "the code generated for the processor and its threads"


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective of a graph that runs: its start's name in the dump, what it does, its group,
    the module that it came from ("" if unknown) and the slice that it belongs to, if any."""

    name: str
    kind: str
    group: str
    module: str
    slice: int | None

    @classmethod
    def of(cls, start: fx.Node) -> CompiledCollective:
        kind, group = collectives.kind_of(start).value, collectives.group_of(start)
        return cls(start.name, kind, group, graph.module_path(start), graph.tag_of(start).slice)

    def __str__(self) -> str:
        place = [] if self.slice is None else [f"slice {self.slice}"]
        place += [f"in {self.module}"] if self.module else []
        return f"{self.name} ({' '.join([self.kind, *place])})"


def collectives_of(gm: fx.GraphModule) -> tuple[CompiledCollective, ...]:
    """The collectives of a graph, in the order in which it starts them."""
    return tuple(
        CompiledCollective.of(node) for node in gm.graph.nodes if collectives.is_start(node)
    )


@dataclasses.dataclass(frozen=True)
class CompiledGraph:
    """One graph that runs.

    kind: "forward", "backward" or "inference"; in a whole step "step", which computes loss and
        gradients, and "scale", which multiplies them by the tangent.
    dump: its text after all passes.
    collectives: in the order of their starts.
    scheduled: program, machine and schedule; None where no schedule ran.
    local: the graph played in its final order at the sizes of this rank's batch, routing balanced;
        None where no schedule ran. A prediction for people: no decision depends on it.
    """

    kind: str
    gm: fx.GraphModule
    dump: str
    collectives: tuple[CompiledCollective, ...]
    scheduled: Scheduled | None
    local: Timeline | None = None

    @property
    def sources(self) -> Sources | None:
        """Where its costs came from; None where no cost table was used."""
        return self.scheduled.sources if self.scheduled else None

    @property
    def timeline(self) -> Timeline | None:
        """The graph played in its final order, None where no schedule ran."""
        return self.scheduled.schedule.after if self.scheduled else None


@dataclasses.dataclass
class Compilation:
    """One compilation, filled while it runs.

    code: Dynamo's number of the code that was compiled; its recompiles share it.
    structure: of the program as captured; ranks with other batches share it.
    inner: who generates the kernels, "eager" or "inductor".
    compiled: the graphs that run, with what is compiled of them.
    program: structure and shapes of parameters, as a cost table names it.
    table: the cost table of `config.costs`, None if formulas are used.
    local_sizes: of this rank's batch; graphs are priced at nominal ones.
    places: per group, how many programs ran collectives of it before this one did.
    slices, axis: how many slices were asked for or chosen, and along what.
    axes: along what the program was cut, in order; regions may have axes of their own.
    choice: what they were chosen from.
    is_whole_step: whether forward and backward are one graph.
    certificate: what exact numerics goes by.
    base_peak_bytes: peak in program order, before scheduling.
    runs: the passes that ran, with their times.
    """

    config: Config
    code: int | None
    parameters: tuple[weakref.ref[torch.nn.Parameter], ...]
    structure: str = ""
    program: str = ""
    profile: Profile | None = None
    table: CostTable | None = None
    local_sizes: Sizes | None = None
    slices: int = 1
    axis: str = "batch"
    choice: Choice | None = None
    axes: tuple[str, ...] = ()
    is_whole_step: bool = False
    sliced_starts: tuple[str, ...] = ()
    reassociated: tuple[str, ...] = ()
    certificate: Certificate = certificate.NONE
    base_peak_bytes: int = 0
    compile_s: float = 0.0
    remarks: list[Remark] = dataclasses.field(default_factory=list[Remark])
    runs: list[Run] = dataclasses.field(default_factory=list[Run])
    graphs: list[CompiledGraph] = dataclasses.field(default_factory=list[CompiledGraph])
    inner: str = "eager"
    compiled: list[Compiled] = dataclasses.field(default_factory=list[Compiled])
    places: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    @classmethod
    def begin(
        cls,
        config: Config,
        example_inputs: Sequence[Any],
        structure: str = "",
        program: str = "",
    ) -> Compilation:
        compile_id = CompileContext.current_compile_id()
        code = compile_id.frame_id if compile_id else None
        parameters = tuple(
            weakref.ref(value) for value in example_inputs if isinstance(value, torch.nn.Parameter)
        )
        record = cls(config, code, parameters, structure, program)
        _RECORDS.append(record)
        return record

    @property
    def is_exact(self) -> bool:
        return self.config.numerics == "exact"

    @property
    def is_trained(self) -> bool:
        """Whether a parameter wants a gradient, be it in this run or in another of the code."""
        parameters = (reference() for reference in self.parameters)
        return any(parameter is not None and parameter.requires_grad for parameter in parameters)

    @property
    def skew(self) -> float:
        """How many times as many routed rows the rank has that decisions are made for, as one has
        that costs speak of without it."""
        if self.config.skew is None:
            return 1.0
        if self.table is not None:
            return self.table.skew(self.config.skew)
        assert not isinstance(self.config.skew, str)
        return self.config.skew

    def add_graph(
        self,
        kind: str,
        gm: fx.GraphModule,
        scheduled: Scheduled | None,
        group_size: Callable[[str], int],
    ) -> None:
        local = self.play(gm, group_size, self.table) if scheduled else None
        self.graphs.append(
            CompiledGraph(kind, gm, printing.dump(gm), collectives_of(gm), scheduled, local)
        )

    def play(
        self,
        gm: fx.GraphModule,
        group_size: Callable[[str], int],
        table: CostTable | None,
        skew: float = 1.0,
    ) -> Timeline:
        """A graph of this compilation in the order of its nodes, at the sizes of this rank's batch
        and `skew` times as many routed rows, with costs from `table`, or from formulas."""
        assert self.profile is not None and self.local_sizes is not None
        sizes = self.local_sizes.skewed(skew)
        costs = pricing.estimate(gm, self.profile, group_size, sizes, table)
        program = simulate.extract(gm, costs)
        machine = Machine.measured(table) if table else Machine.of(self.profile)
        return simulate.simulate(program, range(len(program)), machine)

    def compare_ranks(
        self, kind: str, starts: Sequence[CompiledCollective], compiled: Compiled
    ) -> None:
        """Hold a graph that is about to run for the first time against the same one of the other
        ranks. Raises DivergenceError if they decided otherwise."""
        options: dict[str, int | str] = {
            "slices": self.slices,
            "axis": self.axis,
            "inner": self.inner,
            "check_steps": self.config.check_steps,
            "costs": self.table.digest if self.table else "none",
            "whole_step": self.is_whole_step,
            "numerics": self.config.numerics,
            "certificate": self.certificate.digest,
        }
        # What runs first meets under one key, so that a rank with a whole step meets one without.
        kind = {"step": "forward", "scale": "backward"}.get(kind, kind)
        for group in dict.fromkeys(start.group for start in starts):
            key = f"{self._place(group)}/{self.structure}/{kind}"
            own = [str(start) for start in starts if start.group == group]
            try:
                agree.compare(key, agree.Decided(group, options, own))
                if compiled.kernels:
                    generated = agree.Decided(group, {GENERATED: compiled.digest}, [])
                    agree.compare(f"{key}/{compiled.structure}", generated)
            except dist.DistError as error:  # the job may do well without its store
                text = f"the ranks did not compare what they decided for group {group!r}: {error}"
                self.remarks.append(Remark("", "note", text))

    def _place(self, group: str) -> int:
        """Recompiles keep the place, so that copies of one model are not taken for each other."""
        if group not in self.places:
            earlier = [record for record in _RECORDS if group in record.places]
            same = [record.places[group] for record in earlier if record.is_same_code(self)]
            taken = {record.places[group] for record in earlier}
            self.places[group] = same[0] if same else len(taken)
        return self.places[group]

    def is_same_code(self, other: Compilation) -> bool:
        """Whether `other` compiles the same code of the same module, with the same options."""
        own = {id(ref()) for ref in self.parameters}
        is_same_module = other.is_for(own) or not (self.parameters or other.parameters)
        same = self.code is not None and self.code == other.code
        return same and is_same_module and self.config == other.config

    def is_for(self, parameters: set[int]) -> bool:
        return any(id(ref()) in parameters for ref in self.parameters if ref() is not None)


_RECORDS: list[Compilation] = []


def records() -> tuple[Compilation, ...]:
    """All compilations of this process, oldest first."""
    return tuple(_RECORDS)


def decide(gm: fx.GraphModule, record: Compilation, group_size: Callable[[str], int]) -> Choice:
    """Along what to slice, and into how many parts: what the user says, an earlier decision for
    this code, the best of what the cost table was measured with, or the best forecast.

    Rank-invariant: table and forecast see nominal sizes only, and a recompile that one rank does
    alone keeps what all of them decided first.
    """
    for earlier in _RECORDS:
        if earlier is not record and earlier.graphs and earlier.is_same_code(record):
            return Choice(earlier.axis, earlier.slices)
    if record.table is not None:
        slices = record.config.slices
        if not isinstance(slices, int):
            steps = record.table.programs[record.program]
            slices = best_slices({n: step.at_skew(record.skew) for n, step in steps.items()})
        return Choice(record.axis, slices)
    assert record.profile is not None
    setting = Setting.of(gm, record.profile, group_size, record.skew)
    exact = record.certificate if record.is_exact else None
    return choose(gm, record.config, setting, record.is_trained, exact)
