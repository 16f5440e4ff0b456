"""Golden tests: keep a refactor from losing an overlap.

    def test_layer_keeps_its_overlap():
        with overlap.runtime.fake.world(num_ranks=8):
            model = Layer(dist.group.WORLD)
            assert_overlap_golden(model, (x,), name="layer")

compiles the model, without a GPU or another rank, and compares two things with the stored golden
`golden/layer.graph` beside the test: the text of its graphs, and how much of each collective is
hidden, and behind what. What differs is explained in words. `EXPECTTEST_ACCEPT=1 pytest` writes the
golden anew; read its diff before you commit it.

The figures come from the simulator under a fixed hardware profile, in whole percent, so that a
golden is the same on every machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import fx

from overlap import collectives, graph, printing, report
from overlap.config import Config
from overlap.errors import ConfigError
from overlap.simulate import Event, Timeline

HARDWARE = "h100"
HEADER = "overlap golden 1"
MIN_SHARE = 0.05
MAX_DIFF_LINES = 60
_ACCEPT = "EXPECTTEST_ACCEPT=1 pytest writes it"
_COLLECTIVES = "== collectives"
_NAME = re.compile(r"[\w.-]+")


class CompiledGraph(Protocol):
    """What a golden needs to know of one graph after its last pass.

    kind: as in `compilation.CompiledGraph`.
    timeline: the graph played in its final order, None where nothing was scheduled.
    """

    @property
    def kind(self) -> str: ...
    @property
    def gm(self) -> fx.GraphModule: ...
    @property
    def timeline(self) -> Timeline | None: ...


@dataclasses.dataclass(frozen=True)
class Hiding:
    """One collective of a golden.

    index: counts from 1 the collectives that share all of the fields before it, in order.
    hidden: how much of it compute covers, in whole percent.
    behind: what covers it, by start: each node that covers at least MIN_SHARE of it.
    """

    graph: str
    module: str
    kind: str
    slice: int | None
    index: int
    hidden: int
    behind: tuple[str, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        return self.graph, self.module, self.kind, self.slice, self.index

    @property
    def title(self) -> str:
        module = f" of {self.module}" if self.module else ""
        part = "" if self.slice is None else f", slice {self.slice}"
        return f"{self.kind} {self.index}{module} ({self.graph}{part})"

    @property
    def state(self) -> str:
        """`92 % hidden behind mm, mm_1`, or `exposed`."""
        if self.hidden == 0:
            return "exposed"
        behind = f" behind {', '.join(self.behind)}" if self.behind else ""
        return f"{'hidden' if self.hidden == 100 else f'{self.hidden} % hidden'}{behind}"


@dataclasses.dataclass(frozen=True)
class Golden:
    """What is stored: the dump of each graph by name, and every collective."""

    graphs: tuple[tuple[str, str], ...]
    collectives: tuple[Hiding, ...]

    def __str__(self) -> str:
        text = [HEADER]
        for name, dump in self.graphs:
            text += ["", f"== {name}", dump]
        return "\n".join([*text, "", _COLLECTIVES, *map(_print_hiding, self.collectives), ""])


def _print_hiding(hiding: Hiding) -> str:
    part = "-" if hiding.slice is None else str(hiding.slice)
    fields = (hiding.graph, hiding.module or "-", hiding.kind, part, str(hiding.index))
    return " | ".join([*fields, f"{hiding.hidden} %", ", ".join(hiding.behind) or "-"])


def parse_golden(text: str) -> Golden:
    """The golden that printed as `text`. Raises ConfigError if none did."""
    header, _, body = text.partition("\n")
    before, found, after = body.partition(f"\n{_COLLECTIVES}\n")
    if header != HEADER or not found:
        raise ConfigError(f"expected a golden that starts with {HEADER!r}, found {header!r}")
    graphs = re.findall(r"^== ([^\n]*)\n(.*?)(?=\n\n==|\s*\Z)", before, re.MULTILINE | re.DOTALL)
    return Golden(tuple(graphs), tuple(map(_parse_hiding, after.splitlines())))


def _parse_hiding(line: str) -> Hiding:
    try:
        name, module, kind, part, index, hidden, behind = line.split(" | ")
        return Hiding(
            graph=name,
            module="" if module == "-" else module,
            kind=kind,
            slice=None if part == "-" else int(part),
            index=int(index),
            hidden=int(hidden.removesuffix(" %")),
            behind=() if behind == "-" else tuple(behind.split(", ")),
        )
    except ValueError as error:
        raise ConfigError(f"expected a collective of a golden, found {line!r}") from error


def make_golden(graphs: Iterable[CompiledGraph]) -> Golden:
    """The golden of compiled graphs."""
    compiled = list(graphs)
    dumps = tuple((one.kind, printing.dump(one.gm)) for one in compiled)
    return Golden(dumps, tuple(hiding for one in compiled for hiding in _hidings(one)))


def _hidings(compiled: CompiledGraph) -> Iterator[Hiding]:
    timeline = compiled.timeline
    if timeline is None:
        return
    nodes = {node.name: node for node in compiled.gm.graph.nodes}
    transfers = {event.name: event for event in timeline.events}
    exposed_us = dict(timeline.exposed)
    compute = [event for event in timeline.events if event.lane == "compute"]
    count: dict[Any, int] = {}
    for start in filter(collectives.is_start, nodes.values()):
        kind, part = collectives.kind_of(start).value, graph.tag_of(start).slice
        key = (graph.module_path(start), kind, part)
        count[key] = count.get(key, 0) + 1
        event = transfers[start.name]
        duration_us = event.end_us - event.start_us
        covered = 1 - exposed_us[start.name] / duration_us if duration_us else 1.0
        yield Hiding(
            compiled.kind,
            *key,
            index=count[key],
            hidden=round(100 * covered),
            behind=tuple(_title(nodes[name]) for name in _covering(event, compute)),
        )


def _covering(transfer: Event, compute: Sequence[Event]) -> Iterator[str]:
    """The nodes that compute during a good part of the transfer."""
    least_us = MIN_SHARE * (transfer.end_us - transfer.start_us)
    for event in compute:
        common_us = min(event.end_us, transfer.end_us) - max(event.start_us, transfer.start_us)
        if common_us > 0 and common_us >= least_us:
            yield event.name


def _title(node: fx.Node) -> str:
    module = graph.module_path(node)
    return f"{node.name} of {module}" if module else node.name


def explain_difference(old: Golden, new: Golden) -> list[str]:
    """What `new` does otherwise than `old`, in words, lost overlaps first; empty if they are equal.

    Collectives correspond if they have the same graph, module, kind, slice and index, so that a
    node that only changed its name is no difference but in the text.
    """
    was = {hiding.key: hiding for hiding in old.collectives}
    now = {hiding.key: hiding for hiding in new.collectives}
    common = [(was[key], now[key]) for key in was if key in now]
    lost = [(a, b) for a, b in common if b.hidden < a.hidden]
    won = [(a, b) for a, b in common if b.hidden > a.hidden]
    moved = [(a, b) for a, b in common if b.hidden == a.hidden and b.behind != a.behind]
    words = [f"{b.title} is now {b.state}; it was {a.state}" for a, b in lost + won + moved]
    words += [f"{a.title} is gone; it was {a.state}" for key, a in was.items() if key not in now]
    words += [f"{b.title} is new; it is {b.state}" for key, b in now.items() if key not in was]
    return words + list(_changed_texts(dict(old.graphs), dict(new.graphs)))


def _changed_texts(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    for name in old:
        if name not in new:
            yield f"graph {name!r} is gone"
        elif old[name] != new[name]:
            diff = difflib.ndiff(old[name].splitlines(), new[name].splitlines())
            changed = [line[0] for line in diff if line[0] in "+-"]
            count = f"-{changed.count('-')} +{changed.count('+')} lines"
            yield f"the text of graph {name!r} changed: {count}"
    yield from (f"graph {name!r} is new" for name in new if name not in old)


def assert_overlap_golden(
    model_or_step: Any,
    inputs: Sequence[Any],
    *,
    name: str,
    config: Config | None = None,
    directory: Path | str | None = None,
) -> None:
    """Fail if the compiled program is not the stored one; see the module.

    model_or_step: an `nn.Module` or a function of `inputs`.
    name: of the golden's file, `<name>.graph`.
    config: as for torch.compile; `hardware="auto"` is a fixed profile here.
    directory: of the golden; by default `golden` beside the caller's file.

    Raises AssertionError with the differences, ConfigError for a name that is no file name.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"expected letters, digits, '.', '_' or '-' in a name, found {name!r}")
    if directory is None:
        directory = Path(inspect.stack()[1].filename).parent / "golden"
    config = config or Config()
    if config.hardware == "auto":
        config = dataclasses.replace(config, hardware=HARDWARE)
    check_golden(
        make_golden(report.compile_graphs(model_or_step, inputs, config)), Path(directory), name
    )


def check_golden(golden: Golden, directory: Path, name: str) -> None:
    """Compare with `<name>.graph` in `directory`, or write it if EXPECTTEST_ACCEPT is set."""
    path = directory / f"{name}.graph"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(str(golden))
        return
    if not path.exists():
        raise AssertionError(f"there is no golden {path.name} in {directory.name}/; {_ACCEPT}")
    stored = path.read_text()
    if stored != str(golden):
        raise AssertionError(_mismatch(path, stored, golden))


def _mismatch(path: Path, stored: str, golden: Golden) -> str:
    try:
        words = explain_difference(parse_golden(stored), golden)
    except ConfigError as error:
        return f"{path.name} cannot be read: {error}; {_ACCEPT} anew"
    diff = printing.dump_diff(stored, str(golden)).splitlines()
    cut = [f"... and {len(diff) - MAX_DIFF_LINES} lines more"] if len(diff) > MAX_DIFF_LINES else []
    text = [f"the program is not the one in {path.name}:", *(f"  - {word}" for word in words)]
    text += ["", *diff[:MAX_DIFF_LINES], *cut, "", f"if this is what you want: {_ACCEPT} anew"]
    return "\n".join(text)
