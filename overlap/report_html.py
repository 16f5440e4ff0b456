"""Reports as one HTML file that needs nothing else, and timelines as SVG.

    Track     one timeline: a lane for compute and one for each group
    Lane      what ran there, as boxes
    Box       from when to when, and what to say about it

All tracks of a picture share one time scale, so that a shorter step is a shorter picture.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterable, Iterator, Sequence

from overlap import report
from overlap.report import CollectiveReport, GraphReport, MeasuredStep, Report
from overlap.simulate import Event
from overlap.tables import Grid, megabytes, ms, percent

WIDTH, LABEL_WIDTH, RIGHT = 1120, 96, 16
TITLE_HEIGHT, LANE_HEIGHT, LANE_GAP, TRACK_GAP, AXIS_HEIGHT, LEGEND_HEIGHT = 40, 26, 6, 20, 24, 26
MIN_BOX_PX = 0.6
NUM_COLOURS = 4
LEAST_WAIT_US = 20.0


@dataclasses.dataclass(frozen=True)
class Box:
    """style: class of the style sheet: "s0" to "s3" for slices, "plain", "link" or "wait"."""

    start_us: float
    end_us: float
    style: str
    tip: str


@dataclasses.dataclass(frozen=True)
class Lane:
    name: str
    boxes: tuple[Box, ...]


@dataclasses.dataclass(frozen=True)
class Track:
    """marks: ends of the step's parts by name, ascending; the last one is the step's."""

    title: str
    detail: str
    lanes: tuple[Lane, ...]
    marks_us: tuple[tuple[str, float], ...]

    @property
    def length_us(self) -> float:
        return self.marks_us[-1][1]

    @property
    def height(self) -> int:
        return TITLE_HEIGHT + len(self.lanes) * (LANE_HEIGHT + LANE_GAP)


# ---- from measurements and predictions to tracks ------------------------------------------------


def measured_track(title: str, step: MeasuredStep, found: Report | None = None) -> Track:
    """A step that ran. `found` says which collective belongs to which slice."""
    known = found.collectives if found else ()
    is_matched = len(known) == len(step.transfers)
    blocked = report.union((t.wait_start_us, t.wait_end_us) for t in step.transfers)
    waits = [Box(a, b, "wait", f"waiting for communication: {ms(b - a)}") for a, b in blocked]
    busy = [
        Box(a, b, "plain", f"{name}: {ms(b - a)} without a wait")
        for name, a, b in _busy(step.marks_us, blocked)
    ]
    lanes = [Lane("compute", _sorted([*busy, *waits]))]
    for group in dict.fromkeys(t.group for t in step.transfers):
        boxes = [
            Box(t.start_us, t.end_us, *_describe_transfer(step, i, known if is_matched else ()))
            for i, t in enumerate(step.transfers)
            if t.group == group
        ]
        lanes.append(Lane(_group_name(group), _sorted(boxes)))
    detail = (
        f"{ms(step.length_us)}; communication {ms(step.comm_us)}, exposed {ms(step.exposed_us)}, "
        f"hidden {percent(step.hidden)}"
    )
    return Track(
        title, detail if step.transfers else ms(step.length_us), tuple(lanes), step.marks_us
    )


def _busy(
    marks_us: Sequence[tuple[str, float]], blocked: Sequence[tuple[float, float]]
) -> Iterator[tuple[str, float, float]]:
    """The parts of the step, without the times in which the caller was blocked."""
    start = 0.0
    for name, end in marks_us:
        at = start
        for a, b in [*blocked, (end, end)]:
            if a >= at and min(a, end) > at:
                yield name, at, min(a, end)
            at = max(at, min(b, end))
        start = end


def _describe_transfer(
    step: MeasuredStep, index: int, known: Sequence[CollectiveReport]
) -> tuple[str, str]:
    transfer = step.transfers[index]
    lines = [
        f"{transfer.kind}, {megabytes(transfer.num_bytes)}",
        f"on the link {ms(transfer.comm_us)}",
        f"caller blocked {ms(transfer.blocked_us)}",
        f"issued at {ms(transfer.issue_us)}, waited for at {ms(transfer.wait_start_us)}",
    ]
    if not known:
        return "link", "\n".join(lines)
    one = known[index]
    return _style(one.slice, "link"), "\n".join([_place(one), *lines])


def _place(one: CollectiveReport) -> str:
    part = "not sliced" if one.slice is None else f"slice {one.slice}"
    return f"{one.module or one.name} ({one.graph}, {part})"


def predicted_track(title: str, found: Report, after: bool) -> Track:
    """All graphs of a report, one behind the other, in program order or as scheduled."""
    places = {(one.graph, one.name): one for one in found.collectives}
    lanes: dict[str, list[Box]] = {"compute": []}
    marks: list[tuple[str, float]] = []
    offset_us = comm_us = exposed_us = 0.0
    for graph in found.graphs:
        timeline = graph.after if after else graph.before
        for event in timeline.events:
            lane = "compute" if event.lane in ("compute", "host") else event.lane
            box = _predicted_box(graph, event, places, offset_us)
            if box.style != "wait" or event.end_us - event.start_us >= LEAST_WAIT_US:
                lanes.setdefault(lane, []).append(box)
        offset_us += timeline.makespan_us
        comm_us += timeline.comm_us
        exposed_us += timeline.exposed_us
        marks.append((graph.kind, offset_us))
    hidden = 1 - exposed_us / comm_us if comm_us else 0.0
    detail = (
        f"{ms(offset_us)}; communication {ms(comm_us)}, exposed {ms(exposed_us)}, "
        f"hidden {percent(hidden)}"
    )
    named = [Lane(_group_name(lane), _sorted(boxes)) for lane, boxes in lanes.items()]
    return Track(title, detail, tuple(named), tuple(marks))


def _predicted_box(
    graph: GraphReport,
    event: Event,
    places: dict[tuple[str, str], CollectiveReport],
    offset_us: float,
) -> Box:
    duration_us = event.end_us - event.start_us
    lines = [event.name, ms(duration_us)]
    match event.lane:
        case "host":
            style, lines = "wait", [f"waiting: {event.name}", ms(duration_us)]
        case "compute":
            style = _style(graph.slices.get(event.name), "plain")
        case _:
            one = places[graph.kind, event.name]
            style = _style(one.slice, "link")
            lines = [_place(one), f"{one.kind}, {ms(duration_us)}"]
    return Box(event.start_us + offset_us, event.end_us + offset_us, style, "\n".join(lines))


def _style(index: int | None, otherwise: str) -> str:
    return otherwise if index is None else f"s{index % NUM_COLOURS}"


def _group_name(group: str) -> str:
    return group if group == "compute" else f"group {group}"


def _sorted(boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(sorted(boxes, key=lambda box: (box.start_us, box.end_us)))


# ---- SVG ----------------------------------------------------------------------------------------

# fmt: off
STYLE = """
  :root, svg { --bg: #ffffff; --card: #f6f7f9; --ink: #1c2430; --soft: #5d6775; --line: #d9dde3;
    --plain: #aab3c0; --link: #3f8f98; --wait: #d64545; --wait-bg: #fbe3e1; --accent: #1a6fb5;
    --s0: #3f77b5; --s1: #e08a2c; --s2: #4f9a55; --s3: #9a62a8; }
  @media (prefers-color-scheme: dark) {
    :root, svg { --bg: #14181e; --card: #1c222b; --ink: #e4e8ee; --soft: #98a2b0; --line: #333b47;
      --plain: #5c6675; --link: #4fa3ad; --wait: #f07068; --wait-bg: #43262a; --accent: #6cb2ee;
      --s0: #5d97d8; --s1: #e79a48; --s2: #66b06c; --s3: #b580c2; } }
  svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
  svg .title { font-weight: 600; font-size: 13px; } svg .soft { fill: var(--soft); }
  svg .small { font-size: 11px; } svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
  svg .lane { fill: var(--card); } svg .rule { stroke: var(--line); }
  svg .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
  .plain { fill: var(--plain); } .link { fill: var(--link); } .s0 { fill: var(--s0); }
  .s1 { fill: var(--s1); } .s2 { fill: var(--s2); } .s3 { fill: var(--s3); }
  .wait { fill: url(#hatch); stroke: var(--wait); stroke-width: .6; }
"""
HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--wait-bg)"/>'
    '<rect width="1.6" height="6" fill="var(--wait)"/></pattern></defs>'
)
# fmt: on


def picture(tracks: Sequence[Track]) -> str:
    """A stand-alone SVG file."""
    return _svg(tracks, f"<style>{STYLE}</style>", with_background=True)


def timelines(tracks: Sequence[Track]) -> str:
    """An `<svg>` for a page that has the style sheet; boxes say on hover what they are."""
    return f'<div class="scroll">{_svg(tracks, "", with_background=False)}</div>'


def _svg(tracks: Sequence[Track], style: str, with_background: bool) -> str:
    height = LEGEND_HEIGHT + AXIS_HEIGHT + sum(track.height + TRACK_GAP for track in tracks)
    scale = (WIDTH - LABEL_WIDTH - RIGHT) / max(track.length_us for track in tracks)
    parts = [style, HATCH]
    if with_background:
        parts.append(f'<rect width="{WIDTH}" height="{height}" rx="8" fill="var(--bg)"/>')
    parts += _legend(tracks)
    top = LEGEND_HEIGHT
    for track in tracks:
        parts += _draw_track(track, top, scale)
        top += track.height + TRACK_GAP
    parts += _axis(top, scale, max(track.length_us for track in tracks))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">{"".join(parts)}</svg>'
    )


def _legend(tracks: Sequence[Track]) -> Iterator[str]:
    used = {box.style for track in tracks for lane in track.lanes for box in lane.boxes}
    names = {"plain": "compute", "wait": "waiting for communication", "link": "communication"}
    names |= {f"s{i}": f"slice {i}" for i in range(NUM_COLOURS)}
    x = LABEL_WIDTH
    for style, name in names.items():
        if style not in used:
            continue
        yield f'<rect class="{style}" x="{x}" y="8" width="14" height="11" rx="2"/>'
        yield _text("soft small", x + 19, 17, name)
        x += 38 + round(6.2 * len(name))


def _draw_track(track: Track, top: int, scale: float) -> Iterator[str]:
    yield _text("title", 8, top + 15, track.title, then=track.detail)
    y = top + TITLE_HEIGHT
    width = track.length_us * scale
    for lane in track.lanes:
        yield _text("soft end", LABEL_WIDTH - 8, y + LANE_HEIGHT // 2 + 4, lane.name)
        at = f'x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{LANE_HEIGHT}"'
        yield f'<rect class="lane" {at}/>'
        for box in _merged(lane.boxes, MIN_BOX_PX / scale):
            yield _draw_box(box, y, scale)
        y += LANE_HEIGHT + LANE_GAP
    begin = 0.0
    for name, end in track.marks_us:
        if (end - begin) * scale > 7 * len(name):
            middle = LABEL_WIDTH + (begin + end) / 2 * scale
            yield _text("soft small mid", middle, top + 34, name)
        x = LABEL_WIDTH + end * scale
        yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 24}" y2="{y}"/>'
        begin = end


def _text(style: str, x: float, y: float, words: str, then: str = "") -> str:
    """`then` follows the words, softer."""
    soft = f'<tspan class="soft" font-weight="400" dx="10">{html.escape(then)}</tspan>'
    rest = soft if then else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y}">{html.escape(words)}{rest}</text>'


def _draw_box(box: Box, y: int, scale: float) -> str:
    x = LABEL_WIDTH + box.start_us * scale
    width = max((box.end_us - box.start_us) * scale, MIN_BOX_PX)
    tip = html.escape(box.tip, quote=True).replace("\n", "&#10;")
    return (
        f'<rect class="{box.style}" x="{x:.2f}" y="{y + 1}" width="{width:.2f}" '
        f'height="{LANE_HEIGHT - 2}" data-tip="{tip}"/>'
    )


def _merged(boxes: Sequence[Box], least_us: float) -> Iterator[Box]:
    """Neighbours of one style that are too narrow to be seen become one box."""
    run: list[Box] = []
    for box in boxes:
        is_narrow = box.end_us - box.start_us < least_us
        if (
            run
            and is_narrow
            and box.style == run[0].style
            and box.start_us - run[-1].end_us < least_us
        ):
            run.append(box)
            continue
        yield from _as_one(run)
        run = [box]
    yield from _as_one(run)


def _as_one(run: Sequence[Box]) -> Iterator[Box]:
    if not run:
        return
    first, last = run[0], run[-1]
    tip = first.tip if len(run) == 1 else f"{first.tip}\nand {len(run) - 1} short ones after it"
    yield Box(first.start_us, last.end_us, first.style, tip)


def _axis(top: int, scale: float, length_us: float) -> Iterator[str]:
    step = tick(length_us)
    for i in range(math.floor(length_us / step) + 1):
        x = LABEL_WIDTH + i * step * scale
        yield f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 12}" y2="{top - 7}"/>'
        yield _text("soft small mid", x, top + 6, f"{i * step / 1e3:g}")
    yield _text("soft small end", LABEL_WIDTH - 12, top + 6, "ms")


def tick(length_us: float) -> float:
    """A round distance between ticks, so that there are 5 to 12 of them."""
    rough = length_us / 6
    power = 10 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.7)


# ---- the page -----------------------------------------------------------------------------------

# fmt: off
PAGE_STYLE = """
  body { margin: 0; background: var(--bg); color: var(--ink);
    font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
  main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px; }
  h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 34px 0 10px; }
  p { margin: 6px 0; } .lead, .note { color: var(--soft); } .note { font-size: 13px; }
  .facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 6px; }
  .fact { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
    padding: 10px 16px; min-width: 130px; }
  .fact b { display: block; font-size: 22px; font-weight: 650; color: var(--accent); }
  .fact span { color: var(--soft); font-size: 13px; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
  th { text-align: left; vertical-align: bottom; font-weight: 600; color: var(--soft);
    border-bottom: 1px solid var(--line); }
  th, td { padding: 4px 18px 4px 0; white-space: nowrap; } tr:hover td { background: var(--card); }
  th.figure, td.figure { text-align: right; }
  ul { padding-left: 20px; } li { margin: 3px 0; }
  details { margin: 8px 0; border: 1px solid var(--line); border-radius: 8px; padding: 8px 14px; }
  summary { cursor: pointer; } pre { font: 12px/1.45 ui-monospace, monospace; overflow-x: auto; }
  [data-tip]:hover { opacity: .75; }
  #tip { position: fixed; display: none; pointer-events: none; white-space: pre; z-index: 9;
    background: var(--ink); color: var(--bg); font-size: 12px; padding: 6px 10px;
    border-radius: 6px; }
"""
SCRIPT = """
  const tip = document.getElementById("tip");
  document.addEventListener("mousemove", (event) => {
    const text = event.target.dataset && event.target.dataset.tip;
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = left + "px";
    tip.style.top = event.clientY + 16 + "px";
  });
"""
# fmt: on


def page(title: str, lead: str, parts: Iterable[str]) -> str:
    """A whole HTML document; `parts` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{STYLE}{PAGE_STYLE}</style></head><body>"
        f'<main><h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>'
        f'{"".join(parts)}</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def facts(figures: Iterable[tuple[str, str]]) -> str:
    """Large figures with a word below each."""
    boxes = [
        f'<div class="fact"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for value, name in figures
    ]
    return f'<div class="facts">{"".join(boxes)}</div>'


def table(grid: Grid) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        classes = [" class=figure" if i >= grid.num_left else "" for i in range(len(cells))]
        texts = [html.escape(cell.strip()).replace("\n", "<br>") for cell in cells]
        return "".join(f"<{tag}{c}>{t}</{tag}>" for c, t in zip(classes, texts, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in grid.rows)
    head = f"<thead><tr>{row(grid.columns, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def report_parts(found: Report, unsliced: Report | None = None) -> Iterator[str]:
    """What there is to say about a compilation, as parts of a page. `unsliced`: the same program
    compiled at one slice, whose program order is the program as written."""
    if found.graphs:
        yield heading("Predicted timelines")
        yield note(report.NOMINAL)
        before = predicted_track("sliced, in program order", found, after=False)
        if unsliced:
            before = predicted_track("as written", unsliced, after=False)
        yield timelines([before, predicted_track("as scheduled", found, after=True)])
        yield heading("Graphs")
        yield table(report.graph_grid(found))
        yield heading("Collectives")
        yield table(report.collective_grid(found))
    yield heading("Decisions")
    yield note(report.headline(found))
    yield note(report.reassociated_line(found))
    if found.certificate:
        yield note(found.certificate)
    remarks = report.count_remarks(found)
    items = [f"<li>{html.escape(text)}</li>" for text in remarks]
    yield f"<ul>{''.join(items)}</ul>" if items else note("no remarks")
    for graph in found.graphs:
        yield (
            f"<details><summary>the {graph.kind} graph, {graph.num_nodes} lines</summary>"
            f"<pre>{html.escape(graph.dump)}</pre></details>"
        )


def report_page(found: Report, title: str, unsliced: Report | None = None) -> str:
    """The page of one report."""
    return page(title, report.headline(found), report_parts(found, unsliced))
