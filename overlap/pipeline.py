"""Run passes over a graph, and everything that stands between two of them.

A pass is a frozen dataclass whose fields are its options. The pipeline checks that the graph is in
the phase that the pass requires, runs it, removes dead code, holds the pass to its effect, moves
the graph to the phase that the pass ensures and verifies the rules of that phase. Whatever fails
leaves a folder that reproduces it.

A pipeline prints to text and parses from it: `slice{slices=2},merge_wgrad,schedule`.

`OVERLAP_PASSES=n` runs the first n passes of every `Context` (one compilation, through all of its
graphs) and skips the rest. After any pass the program is correct, so bisecting n finds the pass
that broke it.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from torch import fx

from overlap import collectives, graph, printing, verify
from overlap.config import Config
from overlap.errors import ConfigError, OverlapError, PassError, VerifyError, unknown_name
from overlap.graph import Phase

MAX_DIFF_LINES = 20
RemarkKind = Literal["refused", "skipped", "note"]
_OF_EVERY_PASS = ("name", "effect", "requires", "ensures")
_Fact = TypeVar("_Fact")


class Effect(enum.Enum):
    """What a pass may do to a graph."""

    ANNOTATE = "leaves every line and the order alone"
    REORDER = "leaves the set of lines alone"
    REWRITE = "may change anything"


class Pass(Protocol):
    """One change to a graph: a frozen dataclass that has options as fields and no other state.

    requires, ensures: the phases before and after. A pass runs on a graph that is at least in phase
    `requires` and, unless it only annotates, not yet past `ensures`.
    """

    @property
    def name(self) -> str: ...
    @property
    def effect(self) -> Effect: ...
    @property
    def requires(self) -> Phase: ...
    @property
    def ensures(self) -> Phase: ...

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        """Change `gm`. Raises PassError before the first change if the graph cannot be handled."""
        ...


@dataclasses.dataclass(frozen=True)
class Remark:
    """A decision that is not an error: an overlap that did not happen, or why something did.

    node, module, line: where, as the dump, the model and the user's file name it; "" if unknown.
    advice: what to change; "" if there is nothing to do.
    """

    pass_name: str
    kind: RemarkKind
    message: str
    node: str = ""
    module: str = ""
    line: str = ""
    advice: str = ""

    def __str__(self) -> str:
        subject = f"{self.pass_name}: {self.kind}" if self.pass_name else self.kind
        return f"{subject}: {self.text}"

    @property
    def text(self) -> str:
        """The remark without its pass and kind: place, message, advice."""
        place = " in ".join(part for part in (self.node, self.module) if part)
        place += f" ({self.line})" if self.line else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{place.strip()}{': ' if place else ''}{self.message}{advice}"


@dataclasses.dataclass(frozen=True)
class Run:
    """One pass that ran: its text, how long it and its verification took, and the graph after it
    (kept only if the context asks for dumps)."""

    pass_text: str
    run_us: float
    verify_us: float
    dump: str | None


@dataclasses.dataclass
class Context:
    """What passes of one compilation may know, and what they leave for the report.

    config: the user's options.
    group_size: how many ranks a group has, by the group's name.
    keep_dumps: keep the text of the graph after every pass in `runs`.
    remarks, runs: filled while passes run.
    """

    config: Config
    group_size: Callable[[str], int]
    keep_dumps: bool = False
    remarks: list[Remark] = dataclasses.field(default_factory=list[Remark])
    runs: list[Run] = dataclasses.field(default_factory=list[Run])
    running: str = ""
    _facts: dict[type, Any] = dataclasses.field(default_factory=dict[type, Any])

    def provide(self, fact: object) -> None:
        """Make a value, such as a hardware profile, known to every pass, by its type."""
        self._facts[type(fact)] = fact

    def fact(self, kind: type[_Fact]) -> _Fact:
        """The value of that type. Raises PassError if the caller provided none."""
        if kind not in self._facts:
            known = ", ".join(known.__name__ for known in self._facts) or "nothing"
            raise PassError(f"the context holds no {kind.__name__}; it holds {known}")
        return self._facts[kind]

    def fact_or_none(self, kind: type[_Fact]) -> _Fact | None:
        return self._facts.get(kind)

    def take(self, kind: type[_Fact]) -> _Fact | None:
        """The value of that type, which is then known no longer: a fact about one graph only."""
        return self._facts.pop(kind, None)

    def remark(
        self, kind: RemarkKind, message: str, node: fx.Node | None = None, advice: str = ""
    ) -> None:
        """Record a decision of the running pass. With `strict`, raises PassError for a refusal."""
        place = (
            {"node": node.name, "module": graph.module_path(node), "line": graph.source_line(node)}
            if node
            else {}
        )
        remark = Remark(self.running, kind, message, advice=advice, **place)
        if kind == "refused" and self.config.strict:
            raise PassError(f"{remark.text} (an error because strict=True)")
        self.remarks.append(remark)


def run(gm: fx.GraphModule, passes: Sequence[Pass], ctx: Context) -> None:
    """Run `passes` over `gm` in order, in place.

    Raises PassError if a pass cannot handle the graph, VerifyError if one broke a rule; both name
    the pass and the folder that reproduces the failure.
    """
    for i, step in enumerate(passes):
        if len(ctx.runs) >= _pass_limit():
            skipped = ", ".join(later.name for later in passes[i:])
            ctx.remark("skipped", f"OVERLAP_PASSES={_pass_limit()} leaves out {skipped}")
            return
        _run_pass(gm, step, ctx)


def remove_dead_code(gm: fx.GraphModule) -> None:
    """Remove nodes that nobody reads. Collectives stay, read or not: every rank has to start the
    same ones. So do inputs and everything with an effect."""
    for node in reversed(list(gm.graph.nodes)):
        if not (node.users or node.is_impure() or collectives.is_start(node)):
            gm.graph.erase_node(node)


def print_pipeline(passes: Sequence[Pass]) -> str:
    """The passes as text, with the options that differ from their defaults."""
    return ",".join(map(print_pass, passes))


def print_pass(step: Pass) -> str:
    options = ",".join(
        f"{field.name}={getattr(step, field.name)!r}"
        for field in _options(step)
        if getattr(step, field.name) != field.default
    )
    return f"{step.name}{{{options}}}" if options else step.name


_STEP = re.compile(r"\s*(?P<name>\w+)\s*(\{(?P<options>(?:'[^']*'|[^'{}])*)\})?\s*(?:,|$)")


def parse_pipeline(text: str, known: Mapping[str, Callable[..., Pass]]) -> tuple[Pass, ...]:
    """The passes that `print_pipeline` printed; `known` gives each pass by its name.

    Raises ConfigError for text of another form, an unknown pass and an unknown option.
    """
    passes: list[Pass] = []
    position = 0
    while position < len(text):
        match = _STEP.match(text, position)
        if not match:
            raise ConfigError(f"expected name{{option=value,...}}, found {text[position:]!r}")
        if match["name"] not in known:
            raise unknown_name("pass", match["name"], known)
        passes.append(_make_pass(known[match["name"]], match["name"], match["options"] or ""))
        position = match.end()
    return tuple(passes)


def _make_pass(make: Callable[..., Pass], name: str, options: str) -> Pass:
    try:
        call: Any = ast.parse(f"f({options})", mode="eval").body
        values = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        is_plain = not call.args and None not in values
    except (SyntaxError, ValueError):
        is_plain, values = False, {}
    if not is_plain:
        raise ConfigError(f"pass {name!r} expects option=value,..., found {options!r}")
    valid = [field.name for field in _options(make)]
    for option in values:
        if option not in valid:
            raise unknown_name("option", option, valid, place=f"of pass {name!r}")
    return make(**values)


def _options(step: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a pass that are options rather than what every pass has."""
    return [field for field in dataclasses.fields(step) if field.name not in _OF_EVERY_PASS]


def _pass_limit() -> float:
    text = os.environ.get("OVERLAP_PASSES")
    if text is None:
        return float("inf")
    if not text.isdecimal():
        raise ConfigError(f"OVERLAP_PASSES expects a count of passes, found {text!r}")
    return int(text)


@dataclasses.dataclass(frozen=True)
class _Before:
    """The graph before a pass: what the pass is held to, and what a reproducer shows."""

    snapshot: graph.Snapshot
    signature: verify.Signature


def _run_pass(gm: fx.GraphModule, step: Pass, ctx: Context) -> None:
    before = _Before(
        graph.Snapshot(gm), verify.signature(gm, keep_effects=step.effect is not Effect.REWRITE)
    )
    ctx.running = step.name
    began = time.perf_counter()
    try:
        _check_phase(gm, step)
        step.run(gm, ctx)
        ran = time.perf_counter()
        _finish(gm, step, before)
    except Exception as error:
        raise _explained(error, step, before, ctx) from error
    finally:
        ctx.running = ""
    verified = time.perf_counter()
    text = printing.dump(gm) if ctx.keep_dumps else None
    ctx.runs.append(Run(print_pass(step), (ran - began) * 1e6, (verified - ran) * 1e6, text))


def _check_phase(gm: fx.GraphModule, step: Pass) -> None:
    phase = graph.phase_of(gm)
    if phase < step.requires:
        raise PassError(f"the graph is in phase {phase.name}; it has to be {step.requires.name}")
    if step.effect is not Effect.ANNOTATE and phase > step.ensures:
        raise PassError(
            f"the graph is in phase {phase.name}, past {step.ensures.name}; run the pass earlier"
        )


def _finish(gm: fx.GraphModule, step: Pass, before: _Before) -> None:
    """What follows every pass: clean up, hold it to its effect, verify."""
    if step.effect is Effect.REWRITE:
        remove_dead_code(gm)
    else:
        _check_effect(gm, before.snapshot, step)
    phase = max(graph.phase_of(gm), step.ensures)
    verify.verify(gm, phase, before.signature, after=f"pass {step.name!r}")
    graph.set_phase(gm, phase)
    gm.recompile()


def _check_effect(gm: fx.GraphModule, snapshot: graph.Snapshot, step: Pass) -> None:
    if snapshot.has_same_nodes(gm, in_order=step.effect is Effect.ANNOTATE):
        return
    now, before = printing.lines(gm), printing.lines(snapshot.restored())
    if step.effect is Effect.REORDER:
        now, before = sorted(now), sorted(before)
    if now == before:
        return
    changes = [line for line in difflib.ndiff(before, now) if line[0] in "-+"]
    cut = ["..."] if len(changes) > MAX_DIFF_LINES else []
    shown = "\n".join(changes[:MAX_DIFF_LINES] + cut)
    promise = f"is {step.effect.name}, which {step.effect.value}"
    raise VerifyError(f"pass {step.name!r} {promise}; it changed\n{shown}")


def _explained(error: Exception, step: Pass, before: _Before, ctx: Context) -> OverlapError:
    """`error` with the pass that it came from and the folder that reproduces it."""
    match error:
        case VerifyError():
            kind, message = VerifyError, str(error)
        case OverlapError():
            kind, message = type(error), f"{step.name}: {error}"
        case _:
            kind = VerifyError
            message = f"pass {step.name!r} stopped with {type(error).__name__}: {error}"
    return kind(f"{message}\n{_write_reproducer(message, step, before, ctx)}")


def _write_reproducer(message: str, step: Pass, before: _Before, ctx: Context) -> str:
    """Write what is needed to look at the failure again; returns a line that says where it is."""
    gm = before.snapshot.restored()
    files = {
        "graph.txt": printing.dump(gm),
        "graph.py": f"import torch\nfrom torch import device, inf, nan\n\n{gm.code.strip()}",
        "pipeline.txt": print_pass(step),
        "config.json": json.dumps(dataclasses.asdict(ctx.config), indent=2),
        "error.txt": message,
    }
    digest = hashlib.sha256("\0".join(files.values()).encode()).hexdigest()[:12]
    folder = Path(f"overlap-repro-{digest}")
    try:
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")
    except OSError as error:
        return f"the reproducer could not be written: {error}"
    return f"the graph before the pass is in {folder}/"
