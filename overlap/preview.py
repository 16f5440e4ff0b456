"""What `overlap` would make of a target: compiled for a job of any size in one process, not run.

The job is a fake process group; the program is compiled twice, as asked for and un-sliced, so that
the program as written can be shown beside what becomes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from overlap import report, simulate, target
from overlap.config import Config
from overlap.report import Report
from overlap.runtime import fake
from overlap.simulate import Event, Timeline
from overlap.tables import Grid, megabytes, ms, percent
from overlap.target import MeshSpec


@dataclasses.dataclass(frozen=True)
class Preview:
    """A target compiled for a mesh: with the options that were asked for, and at one slice."""

    target: str
    mesh: MeshSpec
    report: Report
    unsliced: Report


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to run the step: predicted figures of all of its graphs together."""

    name: str
    makespan_us: float
    comm_us: float
    exposed_us: float
    peak_bytes: int

    @classmethod
    def of(cls, name: str, timelines: Sequence[Timeline]) -> Row:
        return cls(
            name=name,
            makespan_us=sum(timeline.makespan_us for timeline in timelines),
            comm_us=sum(timeline.comm_us for timeline in timelines),
            exposed_us=sum(timeline.exposed_us for timeline in timelines),
            peak_bytes=max((timeline.peak_bytes for timeline in timelines), default=0),
        )

    @property
    def hidden(self) -> float:
        return 1 - self.exposed_us / self.comm_us if self.comm_us else 0.0


def preview(name: str, config_name: str | None, mesh: MeshSpec, config: Config) -> Preview:
    """Compile the target for rank 0 of `mesh`.

    Raises ConfigError for an unknown target, and for one that does not fit the mesh.
    """
    with fake.world(mesh.num_ranks):
        wanted = _compile(name, config_name, mesh, config)
        unsliced = wanted
        if wanted.slices != 1:
            one_slice = dataclasses.replace(config, slices=1, strict=False)
            unsliced = _compile(name, config_name, mesh, one_slice)
    return Preview(name, mesh, wanted, unsliced)


def _compile(name: str, config_name: str | None, mesh: MeshSpec, config: Config) -> Report:
    step = target.make_step(name, config_name, mesh)
    return report.explain(report.compile_only(step.loss_module(), step.example_inputs, config))


def rows(looked: Preview) -> list[Row]:
    """The program as written, and what becomes of it."""
    asked, plain = looked.report, looked.unsliced
    found = [
        Row.of("as written", [graph.before for graph in plain.graphs]),
        Row.of("scheduled, 1 slice", [graph.after for graph in plain.graphs]),
    ]
    if asked.slices != 1:
        found.append(
            Row.of(f"scheduled, {asked.slices} slices", [graph.after for graph in asked.graphs])
        )
    return found


def grid(looked: Preview) -> Grid:
    columns = ("program", "predicted", "communication", "exposed", "hidden", "peak memory")
    first = rows(looked)[0]
    cells = tuple(
        (
            row.name,
            ms(row.makespan_us),
            ms(row.comm_us),
            ms(row.exposed_us),
            percent(row.hidden) if row.comm_us else "-",
            megabytes(row.peak_bytes),
            f"{first.makespan_us / row.makespan_us:.2f}x" if row.makespan_us else "-",
        )
        for row in rows(looked)
    )
    return Grid((*columns, "speed-up"), cells)


def title(looked: Preview) -> str:
    ranks = f"{looked.mesh.num_ranks} ranks ({looked.mesh})"
    return f"{looked.target} on {ranks}, simulated on '{looked.report.profile}'"


def view(looked: Preview) -> RenderableType:
    """What `overlap simulate` prints."""
    parts: list[RenderableType] = [Text(title(looked), style="bold"), Text()]
    if looked.report.graphs:
        parts += [grid(looked), Text(), report.collective_grid(looked.report), Text()]
        parts.append(Text(report.NOMINAL))
    parts += [Text(f"  - {text}") for text in report.count_remarks(looked.report)]
    return Group(*parts)


def to_json(looked: Preview) -> dict[str, Any]:
    asked = looked.report
    return {
        "target": looked.target,
        "mesh": dict(looked.mesh.axes),
        "profile": asked.profile,
        "slices": asked.slices,
        "programs": [dataclasses.asdict(row) | {"hidden": row.hidden} for row in rows(looked)],
        "collectives": [dataclasses.asdict(one) for one in asked.collectives],
        "remarks": [dataclasses.asdict(remark) for remark in asked.remarks],
    }


def chrome_trace(looked: Preview) -> dict[str, Any]:
    """The final timelines of all graphs, one behind the other, in one timeline for Perfetto."""
    events: list[Event] = []
    offset_us = 0.0
    for graph in looked.report.graphs:
        events += [
            Event(event.name, event.lane, event.start_us + offset_us, event.end_us + offset_us)
            for event in graph.after.events
        ]
        offset_us += graph.after.makespan_us
    if not looked.report.graphs:
        return {"traceEvents": []}
    last = looked.report.graphs[-1].after
    return simulate.chrome_trace(dataclasses.replace(last, events=tuple(events)))
