"""How the demo's result is shown: one table, the page `report.html`, the picture of the README."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from overlap import report_html
from overlap.demo import BLOCK_STEPS, EAGER, OVERLAP, DemoResult, Variant
from overlap.report import with_measured
from overlap.report_html import Track
from overlap.runtime import memory
from overlap.tables import Grid, percent


def table(result: DemoResult) -> RenderableType:
    """What the terminal shows."""
    lines = [f"  - {line}" for line in notes(result)]
    return Group(
        Text(title(result), style="bold"), Text(), grid(result), Text("\n".join(["", *lines]))
    )


def title(result: DemoResult) -> str:
    options = result.options
    ranks = f"{options.num_ranks} rank{'s' * (options.num_ranks > 1)}"
    if not communicates(result):
        return f"overlap demo: {ranks}, no communication, so nothing to hide"
    return (
        f"overlap demo: {ranks} train a mixture of experts over a link emulated at "
        f"{options.link_mbit:g} Mbit/s"
    )


def communicates(result: DemoResult) -> bool:
    """Whether experts are shared: one rank has all, and so has each of 3 where there are 8."""
    return result.variant(EAGER).comm_ms.median > 0


def grid(result: DemoResult) -> Grid:
    """A row for each variant."""
    columns = (
        "\nvariant",
        "step ms\nmin q1 median",
        "fw+bw ms\npredicted",
        "comm.\nms",
        "exposed\nms",
        "\nhidden",
        "speed-up\n(q1-q3)",
        "loss\ndiffers",
        "memory\nMB",
        "compile\ns",
    )
    return Grid(columns, tuple(_row(variant, result) for variant in result.variants))


def _row(variant: Variant, result: DemoResult) -> tuple[str, ...]:
    step, speedup = variant.step_ms, variant.speedup
    is_eager = variant.name == EAGER
    return (
        _name(variant, result),
        f"{step.min:.0f} {step.q1:.0f} {step.median:.0f}",
        _predicted(variant),
        f"{variant.comm_ms.median:.0f}",
        f"{variant.exposed_ms.median:.0f}",
        percent(variant.hidden) if communicates(result) else "-",
        "-" if is_eager else f"{speedup.median:.2f}x ({speedup.q1:.2f}-{speedup.q3:.2f})",
        "-" if is_eager else f"{variant.max_loss_diff:.1e}",
        f"{variant.peak_bytes / 1e6:.1f}",
        "-" if is_eager else f"{variant.compile_s:.0f}",
    )


def _predicted(variant: Variant) -> str:
    """`556 for 548`: forward and backward, predicted and the median measured."""
    measured = f"{variant.graphs_ms.median:.0f}"
    return (
        measured if variant.predicted_ms is None else f"{variant.predicted_ms:.0f} for {measured}"
    )


def _name(variant: Variant, result: DemoResult) -> str:
    if variant.name != OVERLAP or result.slices == 1:
        return variant.name
    return f"{OVERLAP}, {result.slices} slices"


def notes(result: DemoResult) -> Iterator[str]:
    """What has to be known to read the table."""
    own = result.variant(OVERLAP)
    if communicates(result):
        yield (
            "the link is emulated: gloo moves the real bytes between processes of this machine, "
            "and each collective takes as long as bytes / bandwidth says; gradients are averaged "
            "over plain gloo, beside the link, as part of the step"
        )
    else:
        yield "every rank has all experts: --ranks 2 shares them"
    yield (
        f"{len(result.variants)} copies of the model took turns, {BLOCK_STEPS} steps each, on the "
        f"same batches, {result.num_steps} timed steps in all; speed-up is eager's time over the "
        "variant's, paired by turn"
    )
    first = f"the first loss is {own.first_loss_diff:.1e} off"
    if own.num_equal_losses:
        first = f"the first {own.num_equal_losses} losses are bitwise equal to eager's"
    yield (
        f"numerics '{result.numerics}': {first}; later ones differ, at most as shown, as rounding "
        "adds up and now and then flips a near-tie of a router"
    )
    losses = ", ".join(f"{_name(v, result)} {v.heldout_loss:.4f}" for v in result.variants)
    yield f"held-out loss, nats a byte: {losses}"
    if own.predicted_ms is not None:
        error = own.predicted_ms / own.graphs_ms.median - 1
        source = result.options.costs or "formulas; overlap hardware --measure makes a cost table"
        yield (
            f"fw+bw: forward and backward, which are compiled, without averaging of gradients and "
            f"optimizer; predicted from {source}: {100 * error:+.0f} % for {_name(own, result)}"
        )
    yield f"peak memory: {memory.METHOD}"
    if communicates(result):
        yield "exposed: on the link while the caller was blocked in a wait"


def tracks(result: DemoResult) -> list[Track]:
    """The timelines of one typical step, as written and overlapped."""
    names = {EAGER: "eager: one step as written", OVERLAP: "overlap: the same step"}
    return [
        report_html.measured_track(
            name, result.measured[variant], result.report if variant == OVERLAP else None
        )
        for variant, name in names.items()
        if variant in result.measured
    ]


def picture(result: DemoResult) -> str:
    """The timelines as an SVG file."""
    return report_html.picture(tracks(result))


def page(result: DemoResult) -> str:
    """The report as one HTML file."""
    eager, own = result.variant(EAGER), result.variant(OVERLAP)
    figures = [
        (f"{own.speedup.median:.2f}x", "speed-up over eager"),
        (percent(own.hidden), "of communication hidden"),
        (f"{eager.step_ms.median:.0f} → {own.step_ms.median:.0f} ms", "step, median"),
        (f"{own.max_loss_diff:.1e}", "largest loss difference"),
        (str(result.slices), "slices along the batch"),
    ]
    parts = [
        report_html.facts(figures),
        report_html.heading("Measured timelines of one step on rank 0, over the emulated link"),
        report_html.timelines(tracks(result)),
        report_html.heading("All variants"),
        report_html.table(grid(result)),
        *map(report_html.note, notes(result)),
    ]
    if result.report:
        found = with_measured(result.report, result.measured[OVERLAP])
        parts += report_html.report_parts(found)
    return report_html.page("overlap demo", title(result).partition(": ")[2], parts)
