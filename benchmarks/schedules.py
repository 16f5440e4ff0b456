"""Our schedules beside those of torch's own overlap scheduler, in simulated time.

    python -m benchmarks.schedules [--json]

Each case is traced once per variant and played by one simulator under one cost function: one
compute queue, a FIFO per group, no launch time. Every collective and every matrix product takes 1
unless the case says otherwise, the rest nothing. The variants:

    program   the order it was traced in
    torch     torch._inductor.fx_passes.overlap_scheduling, its memory limits out of the way
    overlap   ours, without a memory cap
    bound     what no order can beat

`peak_bytes` counts results and values in flight, by one tracker for all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import fx

from benchmarks import peers_torch
from overlap import collectives, cost, schedule, simulate
from overlap.collectives import Kind
from overlap.simulate import Machine
from tests import schedule_cases

VARIANTS = ("program", "torch", "overlap", "bound")
_MACHINE = Machine()
_CostFunction = Callable[[fx.Node], float]


def _costs(gather_us: float = 1.0, exchange_us: float = 1.0) -> _CostFunction:
    """Unit costs, but for the collectives."""

    def us(node: fx.Node) -> float:
        if not collectives.is_start(node):
            return cost.unit_us(node)
        is_exchange = collectives.kind_of(node) is Kind.ALL_TO_ALL
        return exchange_us if is_exchange else gather_us

    return us


def cases() -> Iterator[tuple[str, Callable[[], fx.GraphModule], _CostFunction]]:
    """Name, graph and costs of each case."""
    for num_slices in (2, 4):
        yield (
            f"MoE, {num_slices} slices x 4 layers",
            lambda n=num_slices: schedule_cases.sliced_moe(n, 4),
            cost.unit_us,
        )
    yield "MoE with a shared expert", schedule_cases.shared_expert, cost.unit_us
    yield "the same, traced last", lambda: schedule_cases.shared_expert(True), cost.unit_us
    yield "EP backward", schedule_cases.ep_backward, cost.unit_us
    yield "EP backward, exchange 2", schedule_cases.ep_backward, _costs(exchange_us=2.0)
    for gather_us in (0.3, 0.8, 1.2):
        yield (
            f"FSDP forward, 6 layers, gather {gather_us}",
            schedule_cases.fsdp_forward,
            _costs(gather_us=gather_us),
        )
    for num_groups in (1, 2):
        yield (
            f"MoE with FSDP, {num_groups} group{'s' if num_groups > 1 else ''}",
            lambda n=num_groups: schedule_cases.fsdp_moe(4, n),
            _costs(gather_us=0.3),
        )


def rows() -> list[dict[str, Any]]:
    """One row per case and variant: `case`, `variant`, `makespan`, `exposed`, `peak_bytes`."""
    result: list[dict[str, Any]] = []
    with schedule_cases.fake_world():
        for name, make, us in cases():
            program = simulate.extract(gm := make(), cost.from_function(gm, us))
            ours = schedule.schedule(program, _MACHINE)
            timelines = {
                "program": ours.before,
                "torch": _torch_timeline(make(), us),
                "overlap": ours.after,
            }
            result += [_row(name, variant, timeline) for variant, timeline in timelines.items()]
            bound = schedule.lower_bound_us(program, _MACHINE)
            result.append({"case": name, "variant": "bound", "makespan": round(bound, 6)})
    return result


def _row(case: str, variant: str, timeline: simulate.Timeline) -> dict[str, Any]:
    return {
        "case": case,
        "variant": variant,
        "makespan": round(timeline.makespan_us, 6),
        "exposed": round(timeline.exposed_us, 6),
        "peak_bytes": timeline.peak_bytes,
    }


def _torch_timeline(gm: fx.GraphModule, us: _CostFunction) -> simulate.Timeline:
    gm = peers_torch.reorder(gm, us)
    program = simulate.extract(gm, cost.from_function(gm, us))
    return simulate.simulate(program, range(len(program)), _MACHINE)


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table: makespan, and in brackets what is exposed, per case and variant."""
    result = Table("case", *VARIANTS, title="makespan (exposed communication), simulated")
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = {row["variant"]: _cell(row) for row in rows if row["case"] == case}
        result.add_row(case, *(cells[variant] for variant in VARIANTS))
    return result


def _cell(row: dict[str, Any]) -> str:
    exposed = f" ({row['exposed']:g})" if "exposed" in row else ""
    return f"{row['makespan']:g}{exposed}"


def report(
    description: str,
    rows: Callable[[], list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], Table],
) -> None:
    """The command line of a benchmark without options of its own: its rows, or their table."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    arguments = parser.parse_args()
    measured = rows()
    if arguments.json:
        print(json.dumps(measured))
    else:
        Console().print(table(measured))


if __name__ == "__main__":
    report(__doc__ or "", rows, table)
