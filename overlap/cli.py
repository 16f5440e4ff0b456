"""The command line: `overlap demo`, `overlap explain models.moe:train_step`, ... .

Every verb takes `--json`: one JSON document on standard output and nothing else there. Exit codes:
0 ok, 1 a check or a rank failed, 2 usage, 4 ranks decided differently, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import tyro
from rich.console import Console, Group, RenderableType
from tyro.conf import FlagCreatePairsOff, Positional, arg, subcommand

from overlap.errors import ConfigError, DivergenceError, OverlapError
from overlap.tables import Grid

if TYPE_CHECKING:
    from overlap.presets import Preset
    from overlap.preview import Preview
    from overlap.target import MeshSpec

EXIT_FAILED, EXIT_USAGE, EXIT_DIVERGED, EXIT_INTERRUPTED = 1, 2, 4, 130
PIPE_WIDTH = 110


@dataclass(frozen=True)
class Demo:
    """Train a mixture of experts on local ranks over an emulated link, with and without overlap."""

    link: float = 200.0
    """Bandwidth of the emulated link in Mbit/s, each way."""
    ranks: int = 2
    """How many processes train; each wants a core of its own."""
    slices: int | Literal["auto"] = "auto"
    """Slices of the batch; auto: the fastest forecast."""
    steps: int = 44
    """Timed steps of each of the three copies."""
    config: str = "demo"
    """Size of the model: toy, debug or demo."""
    costs: Path | None = None
    """A cost table, as `overlap hardware --measure` writes it."""
    report: Path = Path("report.html")
    """Where the page with both timelines goes."""
    svg: Path | None = None
    """Where the timelines go as a picture; by default nowhere."""
    json: bool = False
    """Print one JSON document and nothing else."""

    def run(self, out: Output) -> None:
        from overlap import demo, demo_view

        _check_files(self.report, self.svg)
        options = demo.DemoOptions(
            link_mbit=self.link,
            num_ranks=self.ranks,
            slices=self.slices,
            steps=self.steps,
            config=self.config,
            costs=None if self.costs is None else str(self.costs),
        )
        result = demo.run(options)
        out.emit(result.to_json(), demo_view.table(result))
        self.report.write_text(demo_view.page(result))
        if self.svg:
            self.svg.write_text(demo_view.picture(result))
        out.say(f"  - both timelines and the compiled graphs: {self.report}")


@dataclass(frozen=True)
class _OfTarget:
    """What explain and simulate share."""

    target: Positional[str]
    """A training step, as module:function."""
    config: str | None = None
    """Which of the target's configurations."""
    mesh: str | None = None
    """How the ranks are laid out, as dp=8,ep=8."""
    world: int | None = None
    """How many ranks, where no mesh is given."""
    slices: int | Literal["auto"] = "auto"
    """How many slices; auto: the fastest forecast."""
    axis: Literal["auto", "batch", "token", "expert"] = "auto"
    """What slices are cut along; auto: the fastest forecast."""
    numerics: Literal["reassociate", "exact"] = "reassociate"
    """Whether sums over sliced rows may round differently."""
    memory_budget: float | None = 1.05
    """Peak memory allowed, as a ratio of the unscheduled peak; None for no limit."""
    costs: Path | None = None
    """A cost table, as `overlap hardware --measure` writes it."""
    skew: float | str | None = None
    """Routed rows of the busiest rank over its even share, or a quantile of the cost table: p90."""
    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True)
class Explain(_OfTarget):
    """Say what overlap makes of a training step, without running it: regions, collectives, memory,
    and each refusal with its reason."""

    hardware: str = "auto"
    """A hardware profile, or the path of one."""
    html: Path | None = None
    """Write the report as a page, too."""

    def run(self, out: Output) -> None:
        from overlap import report_html

        _check_files(self.html)
        looked = _look(self, self.hardware)
        if self.html:
            title = f"overlap: {self.target}"
            page = report_html.report_page(looked.report, title, looked.unsliced)
            self.html.write_text(page)
        out.emit(looked.report.to_json(), looked.report)


@dataclass(frozen=True)
class Simulate(_OfTarget):
    """Play a training step on a hardware profile: as written, scheduled, and sliced."""

    hardware: str = "h100"
    """A hardware profile, or the path of one."""
    trace: Path | None = None
    """Write the final timeline as a Chrome trace, which Perfetto opens."""

    def run(self, out: Output) -> None:
        from overlap import preview

        _check_files(self.trace)
        looked = _look(self, self.hardware)
        if self.trace:
            self.trace.write_text(json.dumps(preview.chrome_trace(looked)))
        out.emit(preview.to_json(looked), preview.view(looked))


@dataclass(frozen=True)
class Passes:
    """List the presets, and what each pass does."""

    json: bool = False
    """Print one JSON document and nothing else."""

    def run(self, out: Output) -> None:
        from overlap import presets

        # A preset prints with the options that differ from a pass's own; so it does in a report.
        names = {"moe": _pipelines(presets.moe(slices=2)), "none": _pipelines(presets.NONE)}
        says = {name: _summary(pass_) for name, pass_ in presets.PASSES.items()}
        lines = [f"{name}: {_in_words(pipelines)}" for name, pipelines in names.items()]
        passes = Grid(("pass", "what it does"), tuple(says.items()), num_left=2)
        out.emit({"presets": names, "passes": says}, Group(passes, "", "presets:", *lines))


@dataclass(frozen=True)
class Hardware:
    """List the hardware profiles, or print one; or measure what a training step's calls take."""

    name: Positional[str | None] = None
    """A profile, or the path of one; by default all are listed."""
    measure: str | None = None
    """Measure this training step, a module:function, on real ranks: writes a cost table."""
    output: Annotated[Path, arg(aliases=["-o"])] = Path("costs.json")
    """Where the cost table goes."""
    config: str | None = None
    """Which of the target's configurations to measure."""
    mesh: str | None = None
    """How the ranks are laid out, as dp=8,ep=8."""
    world: int | None = None
    """How many ranks, where no mesh is given."""
    link: float | None = None
    """Bandwidth of an emulated link between the ranks in Mbit/s; by default plain gloo."""
    steps: int = 9
    """Timed steps of each number of slices."""
    axis: str = "batch"
    """What slices are cut along: batch, token or expert."""
    probe: bool = False
    """Measure which kernels of this machine give a row the same bits alone and among others, and
    keep it as the certificate that numerics='exact' goes by; takes minutes."""
    json: bool = False
    """Print one JSON document and nothing else."""

    def run(self, out: Output) -> None:
        from overlap import hardware

        if self.probe:
            _probe(out)
            return
        if self.measure is not None:
            self._measure(self.measure, out)
            return
        if self.name is not None:
            fields = dataclasses.asdict(hardware.load(self.name))
            rows = tuple((name, str(value)) for name, value in fields.items())
            out.emit(fields, Grid(("field", "value"), rows, num_left=2))
            return
        profiles = [hardware.load(name) for name in hardware.names()]
        columns = ("profile", "device", "fp32 TFLOP/s", "memory GB/s", "node GB/s", "network GB/s")
        rows = tuple(
            (
                profile.name,
                profile.device,
                f"{profile.peak_tflops['float32']:g}",
                f"{profile.memory_gbps:g}",
                f"{profile.node_gbps:g}",
                f"{profile.network_gbps:g}",
            )
            for profile in profiles
        )
        out.emit([dataclasses.asdict(profile) for profile in profiles], Grid(columns, rows, 2))

    def _measure(self, target: str, out: Output) -> None:
        from overlap import measure

        if self.name is not None:
            raise ConfigError(f"--measure takes no profile; found {self.name!r}")
        _check_files(self.output)
        options = measure.MeasureOptions(
            target,
            self.config,
            _mesh(self.mesh, self.world),
            self.link,
            self.steps,
            axis=self.axis,
        )
        table = measure.run(options)
        if measure.is_first_rank():
            table.save(self.output)
            document = measure.summary(table) | {"file": str(self.output)}
            out.emit(document, measure.grid(table))
            out.say(f"\n{measure.skew_line(table)}")
            out.say(f"{len(table.calls)} distinct calls, in {self.output}: costs='{self.output}'")


Command = (
    Annotated[Demo, subcommand("demo")]
    | Annotated[Explain, subcommand("explain")]
    | Annotated[Simulate, subcommand("simulate")]
    | Annotated[Passes, subcommand("passes")]
    | Annotated[Hardware, subcommand("hardware")]
)


@dataclass(frozen=True)
class Output:
    """Where a verb's result goes: JSON or text on `stream`, standard output."""

    is_json: bool
    stream: TextIO

    def emit(self, document: Any, text: RenderableType) -> None:
        if self.is_json:
            print(json.dumps(document, indent=2), file=self.stream)
        else:
            width = None if sys.stdout.isatty() else PIPE_WIDTH
            Console(width=width).print(text, highlight=False)

    def say(self, line: str) -> None:
        if not self.is_json:
            print(line)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line, and leave with its exit code."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def parse(argv: Sequence[str]) -> Any:
    """The command that the arguments name. Exits with 2, and says why, if they name none."""
    return tyro.cli(
        Command,
        prog="overlap",
        description="Hide the communication of distributed PyTorch training under its compute.",
        args=list(argv),
        config=(FlagCreatePairsOff,),
    )


def run(argv: Sequence[str]) -> int:
    """The exit code of one command."""
    command = parse(argv)
    out = Output(command.json, sys.stdout)
    # What a user's target prints is no part of the document.
    elsewhere = redirect_stdout(sys.stderr) if command.json else nullcontext()
    try:
        with elsewhere:
            command.run(out)
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    except DivergenceError as error:
        return _fail(error, EXIT_DIVERGED)
    except (OverlapError, OSError) as error:  # OSError: a file that cannot be written
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        print("overlap: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _fail(error: Exception, code: int) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code


def _check_files(*paths: Path | None) -> None:
    """Whether what is computed can be written, before it is computed."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{str(path)!r} lies in a folder that does not exist")
        if path.is_dir():
            raise ConfigError(f"{str(path)!r} is a folder; name a file in it")


def _probe(out: Output) -> None:
    import torch

    from overlap import certificate, probe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = probe.probe(device)
    path = certificate.save(found)
    saved = dataclasses.replace(found, path=str(path))
    rows = [(name, value or "not set") for name, value in found.environment.items()]
    rows += [("digest", saved.digest), ("file", str(path))]
    document = {"path": str(path), "digest": saved.digest, **found.to_json()}
    out.emit(document, Group(str(saved), Grid(("certificate of", ""), tuple(rows), num_left=2)))


def _look(options: _OfTarget, hardware: str) -> Preview:
    from overlap import preview
    from overlap.config import Config

    mesh = _mesh(options.mesh, options.world)
    config = Config(
        slices=options.slices,
        axis=options.axis,
        numerics=options.numerics,
        memory_budget=options.memory_budget,
        hardware=hardware,
        costs=None if options.costs is None else str(options.costs),
        skew=options.skew,
    )
    return preview.preview(options.target, options.config, mesh, config)


def _mesh(mesh: str | None, world: int | None) -> MeshSpec:
    from overlap.target import MeshSpec

    if mesh is not None and world is not None:
        raise ConfigError("give --mesh or --world, not both: a mesh says how many ranks there are")
    if mesh is not None:
        return MeshSpec.parse(mesh)
    return MeshSpec.of_world(2 if world is None else world)


def _pipelines(preset: Preset) -> dict[str, str]:
    from overlap.pipeline import print_pipeline

    phases = [field.name for field in dataclasses.fields(preset)]
    return {name: print_pipeline(p) for name in phases if (p := getattr(preset, name))}


def _in_words(pipelines: dict[str, str]) -> str:
    return "; ".join(f"{phase} {text}" for phase, text in pipelines.items()) or "no pass"


def _summary(pass_: type) -> str:
    """The first line of the module that a pass lives in, without the pass's name."""
    doc = sys.modules[pass_.__module__].__doc__ or ""
    return doc.strip().split("\n")[0].partition(": ")[2]


if __name__ == "__main__":
    main()
