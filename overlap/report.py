"""What a compilation decided, for people: `overlap.explain(step)` and everything that prints it.

A `Report` is a plain value: it prints as tables, converts to JSON, and travels by pickle. Predicted
figures come from the simulator, at nominal sizes that are the same on all ranks; measured ones from
what a link recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch import nn

from overlap import backend, compilation, cost, graph, shallow
from overlap.choose import Choice
from overlap.compilation import Compilation, CompiledCollective, CompiledGraph
from overlap.config import Config
from overlap.errors import ConfigError, OverlapError
from overlap.pipeline import Remark
from overlap.repeat import More
from overlap.runtime.link import Record, Recording
from overlap.simulate import Timeline
from overlap.tables import Grid, megabytes, ms, percent

WIDTH = 110
NOMINAL = (
    f"Predicted times are for nominal sizes (batch {cost.NOMINAL_BATCH}, other symbolic sizes as "
    "the hardware profile says; those of a cost table where one is given), so that every rank "
    "decides alike."
)


# ---- what was measured --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a measured step; times in microseconds since the step began.

    The bytes were under way from `start_us` to `end_us`; the caller was blocked in its wait from
    `wait_start_us` to `wait_end_us`.
    """

    kind: str
    group: str
    num_bytes: float
    issue_us: float
    start_us: float
    end_us: float
    wait_start_us: float
    wait_end_us: float

    @property
    def comm_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def blocked_us(self) -> float:
        return self.wait_end_us - self.wait_start_us


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """One step as a link saw it.

    marks_us: ends of its parts, by name, ascending: "forward", "backward", ... .
    comm_us: how long anything was on the link. exposed_us: how much of that the caller was blocked
        in a wait. blocked_us: all blocking, which includes waiting for a rank that is late.
    """

    marks_us: tuple[tuple[str, float], ...]
    transfers: tuple[Transfer, ...]
    comm_us: float
    exposed_us: float
    blocked_us: float

    @property
    def length_us(self) -> float:
        return self.marks_us[-1][1]

    @property
    def graphs_us(self) -> float | None:
        """Forward and backward together; None if no mark says when the backward ended."""
        return dict(self.marks_us).get("backward")

    @property
    def hidden(self) -> float:
        """The part of the communication that was not waited for, from 0 to 1; 0 if none was."""
        return 1.0 - self.exposed_us / self.comm_us if self.comm_us else 0.0


def measured_step(recording: Recording, began_s: float, **ends_s: float) -> MeasuredStep:
    """The step that began at `began_s` and whose parts, such as `forward`, ended at `ends_s`; all
    of time.monotonic(), in seconds. Every collective has to have been waited for."""
    records = [record for record in recording.records if not math.isnan(record.wait_exit_s)]

    def since(when_s: float) -> float:
        return (when_s - began_s) * 1e6

    def transfer(record: Record) -> Transfer:
        return Transfer(
            kind=record.kind,
            group=record.group,
            num_bytes=record.num_bytes,
            issue_us=since(record.issue_s),
            start_us=since(record.start_s),
            end_us=since(record.end_s),
            wait_start_us=since(record.wait_enter_s),
            wait_end_us=since(record.wait_exit_s),
        )

    transfers = tuple(map(transfer, records))
    on_link = union((t.start_us, t.end_us) for t in transfers)
    blocked = union((t.wait_start_us, t.wait_end_us) for t in transfers)
    return MeasuredStep(
        marks_us=tuple((name, since(end_s)) for name, end_s in ends_s.items()),
        transfers=transfers,
        comm_us=_length(on_link),
        exposed_us=_length(on_link) + _length(blocked) - _length(union([*on_link, *blocked])),
        blocked_us=_length(blocked),
    )


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint ascending intervals that cover the same points."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        elif end > start:
            result.append((start, end))
    return result


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


# ---- the report ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CollectiveReport:
    """One collective of the compiled program.

    graph: kind of its graph; name: of its start in that graph's dump.
    comm_us, exposed_us: predicted. measured_us, measured_exposed_us: time on the link, and blocked
        in its wait; None where nothing was measured.
    """

    graph: str
    name: str
    kind: str
    group: str
    module: str
    slice: int | None
    comm_us: float
    exposed_us: float
    measured_us: float | None = None
    measured_exposed_us: float | None = None


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """One graph that runs: its text, its timelines in program order and as scheduled, the priority
    that won, which node belongs to which slice, and how long it is predicted to take at the sizes
    of this rank's batch."""

    kind: str
    dump: str
    before: Timeline
    after: Timeline
    method: str
    slices: dict[str, int]
    local_us: float = 0.0

    @property
    def num_nodes(self) -> int:
        return len(self.dump.splitlines())


@dataclasses.dataclass(frozen=True)
class Region:
    """A module whose collectives run once per slice: how many of them, in all graphs."""

    module: str
    num_collectives: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What was decided for one compiled program, and what it is worth.

    slices, axis: asked for, or chosen; where regions have axes of their own, all of them, as
        "expert, batch".
    profile: name of the hardware profile behind the predictions.
    choice: what slices and axis were chosen from, None if nothing was sliced.
    costs: the cost table behind them and what of it was used, "" if it is the profile's formulas.
    reassociated: sums over sliced rows that may be added in another order.
    certificate: what exact numerics went by; "" for other numerics.
    num_compilations: how often this callable was compiled; the latest that has a backward is shown.
    kernels: who generated the kernels of each graph, in words.
    measured: a step that ran, None if none was given.
    """

    slices: int
    axis: str
    numerics: str
    profile: str
    graphs: tuple[GraphReport, ...]
    collectives: tuple[CollectiveReport, ...]
    reassociated: tuple[str, ...]
    remarks: tuple[Remark, ...]
    compile_s: float
    num_compilations: int
    certificate: str = ""
    kernels: tuple[str, ...] = ()
    measured: MeasuredStep | None = None
    costs: str = ""
    choice: Choice | None = None

    @property
    def predicted_us(self) -> float:
        """All graphs of a step, at the sizes of this rank's batch and balanced routing."""
        return sum(graph.local_us for graph in self.graphs)

    @property
    def regions(self) -> tuple[Region, ...]:
        sliced = [c for c in self.collectives if c.slice == 0]
        modules = dict.fromkeys(c.module for c in sliced)
        return tuple(Region(m, sum(c.module == m for c in sliced)) for m in modules)

    @property
    def peak_before_bytes(self) -> int:
        return max((g.before.peak_bytes for g in self.graphs), default=0)

    @property
    def peak_after_bytes(self) -> int:
        return max((g.after.peak_bytes for g in self.graphs), default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain data: everything but the dumps and the timelines."""
        return {
            "slices": self.slices,
            "axis": self.axis,
            "numerics": self.numerics,
            "profile": self.profile,
            "costs": self.costs,
            "forecast": dataclasses.asdict(self.choice) if self.choice else None,
            "predicted_us": self.predicted_us,
            "measured_us": self.measured.graphs_us if self.measured else None,
            "regions": [dataclasses.asdict(region) for region in self.regions],
            "graphs": [_graph_json(one) for one in self.graphs],
            "collectives": [dataclasses.asdict(one) for one in self.collectives],
            "peak_before_bytes": self.peak_before_bytes,
            "peak_after_bytes": self.peak_after_bytes,
            "reassociated": list(self.reassociated),
            "remarks": [dataclasses.asdict(remark) for remark in self.remarks],
            "compile_s": self.compile_s,
            "num_compilations": self.num_compilations,
            "certificate": self.certificate,
            "kernels": list(self.kernels),
        }

    def __rich__(self) -> RenderableType:
        return Group(*_sections(self))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()

    __repr__ = __str__


def explain(step: Any, recording: Recording | None = None) -> Report:
    """What `overlap` made of `step`, after its first call.

    step: what torch.compile returned, or a `Compilation`.
    recording: of one step that ran, for measured times beside the predicted ones.

    Raises ConfigError if `step` was not compiled by this backend in this process.
    """
    if isinstance(step, Compilation):
        found = [step]
    else:
        parameters = {id(parameter) for parameter in _parameters_of(step)}
        found = [record for record in compilation.records() if record.is_for(parameters)]
    if not found:
        raise ConfigError(
            f"nothing is known about this {type(step).__name__}; expected what "
            "torch.compile(..., backend='overlap') returned, after its first call"
        )
    measured = None
    if recording is not None and recording.records:
        records = recording.records
        measured = measured_step(
            recording,
            min(record.issue_s for record in records),
            step=max(record.wait_exit_s for record in records),
        )
    return _report(_most_telling(found), len(found), measured)


def with_measured(report: Report, measured: MeasuredStep) -> Report:
    """The report with measured times beside the predicted ones."""
    matched = tuple(_match(report.collectives, measured))
    return dataclasses.replace(report, collectives=matched, measured=measured)


def compile_graphs(
    model_or_step: Callable[..., Any], inputs: Sequence[Any], config: Config
) -> list[CompiledGraph]:
    """The graphs that `config` makes of a model or a function, without running any of them.

    What was compiled in this process is forgotten first, so that the result depends on the
    arguments alone. Only what Dynamo captures before the first break of the graph is compiled.
    """
    return compile_only(model_or_step, inputs, config).graphs


def compile_only(
    model_or_step: Callable[..., Any], inputs: Sequence[Any], config: Config
) -> Compilation:
    """The same, with all that was decided."""
    torch.compiler.reset()
    num_known = len(compilation.records())

    failed: list[OverlapError] = []

    def compile_and_stop(gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            backend.overlap(gm, example_inputs, dataclasses.asdict(config))
        except OverlapError as error:  # Dynamo would wrap it
            failed.append(error)
        return _stop

    try:
        torch.compile(model_or_step, backend=compile_and_stop)(*inputs)
    except _Stopped:
        if failed:
            raise failed[0] from None
        return compilation.records()[num_known]
    finally:
        torch.compiler.reset()
    raise ConfigError("nothing was captured: the target runs no tensor operator")


def compile_repeated(model: nn.Module, inputs: Sequence[Any], config: Config) -> Compilation:
    """The same for a training step of a deep model whose equal layers are traced once; with all
    that was decided. What was compiled does not run.

    The model may be of fake tensors, which take no memory. Raises ConfigError for one on the meta
    device, for which autograd derives another program, and if it has no equal layers in a row;
    PassError if they are not called alike, or their graphs do not repeat.
    """
    if any(tensor.is_meta for tensor in shallow.tensors_of(model)):
        raise ConfigError(
            "on the meta device a loss has no gradient; build the model of fake tensors on the "
            "device that it is for (torch._subclasses.FakeTensorMode)"
        )
    run = shallow.longest_run(model)
    if run is None:
        raise ConfigError(f"the model has no more than {shallow.KEPT} equal layers in a row")
    shallow.check_uniform(model, run, inputs)
    failed: list[OverlapError] = []

    def compile_deeper(gm: Any, example_inputs: Sequence[Any]) -> Any:
        own = {id(tensor) for tensor in shallow.tensors_of(run.modules[0])}
        num_inputs = sum(id(value) in own for value in example_inputs)
        more = More(run.length - shallow.KEPT, num_inputs, run.path, run.first)
        try:
            backend.compile_deeper(gm, example_inputs, config, more)
        except OverlapError as error:  # Dynamo would wrap it
            failed.append(error)
            raise backend.Unrolled from error

    torch.compiler.reset()
    num_known = len(compilation.records())
    backend.mark_sizes_dynamic(inputs)
    with shallow.shortened(run), contextlib.suppress(backend.Unrolled):
        torch.compile(model, backend=compile_deeper, fullgraph=True)(*inputs)
    torch.compiler.reset()
    if failed:
        raise failed[0]
    return compilation.records()[num_known]


class _Stopped(BaseException):
    """The compiled program was about to run."""


def _stop(*_: Any) -> Any:
    raise _Stopped


def _parameters_of(step: Any) -> Iterator[nn.Parameter]:
    if isinstance(step, nn.Module):
        yield from step.parameters()
        return
    function = inspect.unwrap(getattr(step, "_torchdynamo_orig_callable", step))
    owner = getattr(function, "__self__", None)
    reached = [owner]
    if inspect.isfunction(function):
        seen = inspect.getclosurevars(function)
        reached += [*seen.nonlocals.values(), *seen.globals.values()]
    for value in reached:
        if isinstance(value, nn.Module):
            yield from value.parameters()


def _most_telling(records: Sequence[Compilation]) -> Compilation:
    with_backward = [r for r in records if any(g.kind in ("backward", "step") for g in r.graphs)]
    return (with_backward or list(records))[-1]


def _report(record: Compilation, num_compilations: int, measured: MeasuredStep | None) -> Report:
    scheduled = [one for one in record.graphs if one.scheduled is not None]
    report = Report(
        slices=record.slices,
        axis=", ".join(record.axes) or record.axis,
        numerics=record.config.numerics,
        profile=record.profile.name if record.profile else "",
        costs=_costs(record),
        choice=record.choice,
        graphs=tuple(map(_graph_report, scheduled)),
        collectives=tuple(c for one in scheduled for c in _collective_reports(one)),
        reassociated=record.reassociated,
        remarks=tuple(record.remarks),
        compile_s=record.compile_s,
        num_compilations=num_compilations,
        certificate=str(record.certificate) if record.is_exact else "",
        kernels=tuple(_kernel_lines(record)),
    )
    return report if measured is None else with_measured(report, measured)


def _kernel_lines(record: Compilation) -> Iterator[str]:
    if record.inner == "eager":
        yield "kernels: eager"
        return
    if not record.compiled:
        yield "kernels: Inductor's, for the whole program"
    for one in record.compiled:
        yield (
            f"kernels of the {one.kind}: Inductor's, {len(one.kernels)} runs, {one.num_distinct} "
            f"of them distinct, for {one.num_nodes} operators; {one.num_eager} operators are eager"
        )


def _costs(record: Compilation) -> str:
    sources = [one.sources for one in record.graphs if one.sources is not None]
    if record.table is None or not sources:
        return ""
    used = sum(sources[1:], sources[0])
    return f"cost table {record.config.costs} (sha256 {record.table.digest[:12]}): {used}"


def _graph_report(one: CompiledGraph) -> GraphReport:
    assert one.scheduled is not None and one.local is not None
    schedule = one.scheduled.schedule
    slices = {node.name: graph.tag_of(node).slice for node in one.gm.graph.nodes}
    return GraphReport(
        kind=one.kind,
        dump=one.dump,
        before=schedule.before,
        after=schedule.after,
        method=schedule.method,
        slices={name: index for name, index in slices.items() if index is not None},
        local_us=one.local.makespan_us,
    )


def _collective_reports(one: CompiledGraph) -> Iterator[CollectiveReport]:
    assert one.scheduled is not None
    timeline = one.scheduled.schedule.after
    comm_us = {event.name: event.end_us - event.start_us for event in timeline.events}
    exposed_us = dict(timeline.exposed)
    for found in one.collectives:
        yield CollectiveReport(
            graph=one.kind,
            **_facts(found),
            comm_us=comm_us.get(found.name, 0.0),
            exposed_us=exposed_us.get(found.name, 0.0),
        )


def _facts(found: CompiledCollective) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}


def _match(
    collectives: Sequence[CollectiveReport], measured: MeasuredStep
) -> Iterator[CollectiveReport]:
    """Starts run in the order of the program, graph by graph; so do the transfers."""
    if len(collectives) != len(measured.transfers):
        yield from collectives
        return
    for one, transfer in zip(collectives, measured.transfers, strict=True):
        yield dataclasses.replace(
            one, measured_us=transfer.comm_us, measured_exposed_us=transfer.blocked_us
        )


def _graph_json(one: GraphReport) -> dict[str, Any]:
    def figures(timeline: Timeline) -> dict[str, Any]:
        return {
            "makespan_us": timeline.makespan_us,
            "compute_us": timeline.compute_us,
            "comm_us": timeline.comm_us,
            "exposed_us": timeline.exposed_us,
            "hidden": timeline.hidden,
            "peak_bytes": timeline.peak_bytes,
        }

    return {
        "kind": one.kind,
        "num_nodes": one.num_nodes,
        "method": one.method,
        "before": figures(one.before),
        "after": figures(one.after),
    }


# ---- how it prints ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """The collectives of one module that do the same in each slice, as one row of a table."""

    graph: str
    module: str
    kind: str
    group: str
    index: int
    parts: tuple[CollectiveReport, ...]

    @property
    def title(self) -> str:
        return f"{self.kind} {self.index}"

    @property
    def slices(self) -> str:
        return str(len(self.parts)) if self.parts[0].slice is not None else "not sliced"

    def total(self, field: str) -> float | None:
        values = [getattr(part, field) for part in self.parts]
        return None if None in values else sum(values)


def collective_rows(report: Report) -> list[CollectiveRow]:
    """The report's collectives, those that differ in the slice alone together."""
    counts: dict[Any, int] = {}
    rows: dict[Any, list[CollectiveReport]] = {}
    for one in report.collectives:
        key = (one.graph, one.module, one.kind, one.group)
        counts[*key, one.slice] = index = counts.get((*key, one.slice), 0) + 1
        rows.setdefault((*key, one.slice is None, index), []).append(one)
    return [
        CollectiveRow(graph, module, kind, group, index, tuple(parts))
        for (graph, module, kind, group, _, index), parts in rows.items()
    ]


_AXES = {
    "batch": "the batch",
    "token": "the tokens of each exchange",
    "expert": "the experts of each rank",
}


def headline(report: Report) -> str:
    along = " and ".join(_AXES[axis] for axis in report.axis.split(", "))
    slices = "not sliced" if report.slices == 1 else f"{report.slices} slices along {along}"
    return (
        f"{slices}, numerics '{report.numerics}', hardware profile '{report.profile}', "
        f"compiled in {report.compile_s:.1f} s"
    )


def _sections(report: Report) -> Iterator[RenderableType]:
    yield Text(headline(report))
    if report.num_compilations > 1:
        yield Text(f"compiled {report.num_compilations} times; shown is the latest with a backward")
    if report.graphs:
        yield graph_grid(report)
        yield Text()
        yield collective_grid(report)
        yield Text(NOMINAL)
        yield Text(predicted_line(report))
        yield Text(f"costs: {report.costs or 'formulas of the profile'}")
    for line in report.kernels:
        yield Text(line)
    if line := forecast_line(report):
        yield Text(line)
    yield Text(reassociated_line(report))
    if report.certificate:
        yield Text(report.certificate)
    yield Text("\nremarks:" if report.remarks else "\nno remarks")
    for text, count in count_remarks(report).items():
        yield Text(f"  - {text}{f' ({count} times)' if count > 1 else ''}")


def forecast_line(report: Report) -> str:
    """What axis and slices were chosen from; "" if they were given."""
    if report.choice is None or report.choice.unsliced_us is None:
        return ""
    sliced = "; ".join(map(str, report.choice.candidates))
    return f"forecast of a step: un-sliced {ms(report.choice.unsliced_us)}; {sliced}"


def predicted_line(report: Report) -> str:
    """The step that is predicted for this rank's batch, beside the one that was measured."""
    graphs = " + ".join(f"{one.kind} {ms(one.local_us)}" for one in report.graphs)
    routing = "as it was measured" if report.costs else "balanced"
    line = f"predicted for this rank's batch, routing {routing}: {graphs}"
    line += f" = {ms(report.predicted_us)}" if len(report.graphs) > 1 else ""
    measured_us = report.measured.graphs_us if report.measured else None
    if measured_us is None:
        return line
    error = report.predicted_us / measured_us - 1
    return f"{line}; measured {ms(measured_us)} ({100 * error:+.0f} %)"


def reassociated_line(report: Report) -> str:
    """What may round otherwise than in the program as written, in words."""
    if report.slices == 1 or report.numerics == "exact":
        return "no sum is added in another order than in the program as written"
    if not report.reassociated:
        return "no sum is added in another order: what is sliced leaves every sum as it is"
    return f"added in another order, in fp32 or better: {', '.join(report.reassociated)}"


def count_remarks(report: Report) -> dict[str, int]:
    """The remarks as text, each once, with how often it was made."""
    counts: dict[str, int] = {}
    for remark in report.remarks:
        counts[str(remark)] = counts.get(str(remark), 0) + 1
    return counts


def graph_grid(report: Report) -> Grid:
    """Predicted figures of each graph, in program order and as scheduled."""
    columns = ("nodes", "predicted", "communication", "exposed", "hidden", "peak memory")
    rows = [
        (
            one.kind,
            order,
            str(one.num_nodes),
            ms(timeline.makespan_us),
            ms(timeline.comm_us),
            ms(timeline.exposed_us),
            percent(timeline.hidden),
            megabytes(timeline.peak_bytes),
        )
        for one in report.graphs
        for order, timeline in (("of the program", one.before), ("scheduled", one.after))
    ]
    return Grid(("graph", "order", *columns), tuple(rows), num_left=2)


def collective_grid(report: Report) -> Grid:
    """Predicted, and where there is a measured step measured, times of the collectives."""
    is_measured = any(one.measured_us is not None for one in report.collectives)
    columns = ["slices", "predicted", "exposed"] + ["measured", "blocked"] * is_measured
    fields = ["comm_us", "exposed_us"] + ["measured_us", "measured_exposed_us"] * is_measured
    rows = [
        (row.graph, row.module, row.title, row.group, row.slices, *map(ms, map(row.total, fields)))
        for row in collective_rows(report)
    ]
    return Grid(("graph", "module", "collective", "group", *columns), tuple(rows), num_left=4)
