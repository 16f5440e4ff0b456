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

from overlap import collectives, cost, graph, printing
from overlap.config import Config
from overlap.hardware import Profile
from overlap.inner.runs import Compiled
from overlap.passes.schedule import Scheduled
from overlap.pipeline import Remark
from overlap.runtime import agree
from overlap.simulate import Timeline

LOG = logging.getLogger("overlap")
GENERATED = "the code generated for the processor and its threads"

CANDIDATE_SLICES = (1, 2, 4)
_SLICE_TAX = 0.03
"""Extra compute per further slice: smaller kernels, joins."""
_BACKWARD_NODES = 1.5
"""Nodes of a backward for each of its forward, by count in the models."""
_BUBBLE = 0.5
"""What stays exposed of one slice's shorter half, by measurement of 2 and 4 slices on two ranks."""
_LEAST_GAIN = 1.03
"""A predicted speed-up below this is within the error of the formulas: leave the program alone."""


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

    kind: "forward", "backward" or "inference".
    dump: its text after all passes.
    collectives: in the order of their starts.
    scheduled: program, machine and schedule; None where no schedule ran.
    """

    kind: str
    gm: fx.GraphModule
    dump: str
    collectives: tuple[CompiledCollective, ...]
    scheduled: Scheduled | None

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
    places: per group, how many programs ran collectives of it before this one did.
    slices, axis: how many slices were asked for or chosen, and along what.
    base_peak_bytes: peak in program order, before scheduling.
    """

    config: Config
    code: int | None
    parameters: tuple[weakref.ref[torch.nn.Parameter], ...]
    structure: str = ""
    profile: Profile | None = None
    slices: int = 1
    axis: str = "batch"
    sliced_starts: tuple[str, ...] = ()
    reassociated: tuple[str, ...] = ()
    base_peak_bytes: int = 0
    compile_s: float = 0.0
    remarks: list[Remark] = dataclasses.field(default_factory=list[Remark])
    graphs: list[CompiledGraph] = dataclasses.field(default_factory=list[CompiledGraph])
    inner: str = "eager"
    compiled: list[Compiled] = dataclasses.field(default_factory=list[Compiled])
    places: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    @classmethod
    def begin(
        cls, config: Config, example_inputs: Sequence[Any], structure: str = ""
    ) -> Compilation:
        compile_id = CompileContext.current_compile_id()
        code = compile_id.frame_id if compile_id else None
        parameters = tuple(
            weakref.ref(value) for value in example_inputs if isinstance(value, torch.nn.Parameter)
        )
        record = cls(config, code, parameters, structure)
        _RECORDS.append(record)
        return record

    @property
    def is_trained(self) -> bool:
        """Whether a parameter wants a gradient, be it in this run or in another of the code."""
        parameters = (reference() for reference in self.parameters)
        return any(parameter is not None and parameter.requires_grad for parameter in parameters)

    def add_graph(self, kind: str, gm: fx.GraphModule, scheduled: Scheduled | None) -> None:
        self.graphs.append(
            CompiledGraph(kind, gm, printing.dump(gm), collectives_of(gm), scheduled)
        )

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
        }
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


def decide_slices(gm: fx.GraphModule, record: Compilation, group_size: Callable[[str], int]) -> int:
    """How many slices: the user's number, an earlier decision for this code, or the formula's.

    Rank-invariant: the formula sees nominal sizes only, and a recompile that one rank does alone
    keeps what all of them decided first.
    """
    if isinstance(record.config.slices, int):
        return record.config.slices
    for earlier in _RECORDS:
        if earlier is not record and earlier.graphs and earlier.is_same_code(record):
            return earlier.slices
    assert record.profile is not None
    load = Load.of(gm, record.profile, group_size, record.is_trained)
    best = min(CANDIDATE_SLICES, key=load.predicted_us)
    return best if load.predicted_us(1) >= _LEAST_GAIN * load.predicted_us(best) else 1


@dataclasses.dataclass(frozen=True)
class Load:
    """What an un-sliced forward occupies, in microseconds: kernels, launches, links, latencies.

    is_trained: whether a backward follows.
    """

    compute_us: float
    launch_us: float
    comm_us: float
    latency_us: float
    is_trained: bool = True

    @classmethod
    def of(
        cls,
        gm: fx.GraphModule,
        profile: Profile,
        group_size: Callable[[str], int],
        is_trained: bool = True,
    ) -> Load:
        costs = cost.estimate(gm, profile, group_size)
        starts = [node for node in gm.graph.nodes if collectives.is_start(node)]
        return cls(
            compute_us=sum(costs.of(node).compute_us for node in gm.graph.nodes),
            launch_us=profile.launch_us * len(gm.graph.nodes),
            comm_us=sum(costs.of(node).collective_us for node in starts),
            latency_us=profile.latency_us * len(starts),
            is_trained=is_trained,
        )

    def predicted_us(self, slices: int) -> float:
        """The time of the forward, and of the backward if there is one, in `slices` slices.

        They are graphs of their own: what is left over in one hides nothing of the other. A
        backward computes a gradient for both operands of a product and sends as much.
        """
        forward_us = self._graph_us(slices, self.compute_us, self.launch_us)
        if not self.is_trained:
            return forward_us
        backward_us = self._graph_us(slices, 2 * self.compute_us, _BACKWARD_NODES * self.launch_us)
        return forward_us + backward_us

    def _graph_us(self, slices: int, compute_us: float, launch_us: float) -> float:
        """The two-resource bound.

        Un-sliced, communication and compute add up. With N slices the longer of the two remains,
        plus a part of one slice of the shorter: stages of one slice are not as long as those of
        another.
        """
        if slices == 1 or not self.comm_us:
            return compute_us + launch_us + self.comm_us
        compute_us = compute_us * (1 + _SLICE_TAX * (slices - 1)) + launch_us * slices
        comm_us = self.comm_us + self.latency_us * (slices - 1)
        return max(compute_us, comm_us) + _BUBBLE * min(compute_us, comm_us) / slices
