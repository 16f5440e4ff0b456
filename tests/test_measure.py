"""Measuring on two real ranks: one table, that prices the graphs it was made from."""

from __future__ import annotations

import dataclasses
import functools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlap
from models import MoEBlock, MoEConfig
from overlap import choose, cli, cost_table, measure
from overlap.cost_table import CostTable
from overlap.errors import RankError
from overlap.measure import Seen, TimedGraph
from overlap.report import Report
from tests.dist import run_ranks
from tests.tracing import trace

BATCH, SEQ, WIDTH = 8, 4, 16


def make_block() -> nn.Module:
    torch.manual_seed(0)
    config = MoEConfig(hidden_dim=8, num_experts=4, top_k=2)
    return MoEBlock(WIDTH, config, dist.group.WORLD)


def make_step(compile_module: measure.Compile) -> Callable[[], None]:
    block = make_block()
    forward = compile_module(block)
    x = torch.randn(BATCH, SEQ, WIDTH)
    return functools.partial(measure.run_step, block, lambda x: forward(x).sum(), [x])


def measure_block(rank: int, num_ranks: int) -> CostTable:
    return measure.measure(make_step, overlap.Config(), steps=2, slices=(1, 2))


def use_block(rank: int, num_ranks: int, files: list[str], rows: int, slices: Any) -> Report:
    block = make_block()
    options = {"costs": files[rank], "slices": slices}
    step = torch.compile(block, backend="overlap", fullgraph=True, options=options)
    step(torch.randn(rows, SEQ, WIDTH)).sum().backward()
    return overlap.explain(step)


@pytest.fixture(scope="module")
def table() -> CostTable:
    first, second = run_ranks(measure_block, 2, timeout_s=250)
    assert first == second
    return first


@pytest.fixture
def path(table: CostTable, tmp_path: Path) -> str:
    found = tmp_path / "costs.json"
    table.save(found)
    return str(found)


@pytest.mark.dist
def test_the_table_says_where_and_at_which_sizes(table: CostTable) -> None:
    assert (table.place.ranks, table.place.backend, table.place.link) == (2, "gloo", "")
    assert table.place.torch == torch.__version__
    assert (table.dims, table.axis) == ({0: BATCH, 1: SEQ}, "batch")
    assert 0 <= table.contention < 20
    (steps,) = table.programs.values()
    assert list(steps) == [1, 2]
    assert all(step.predicted_us > 0 and step.measured_us > 0 for step in steps.values())
    for step in steps.values():
        assert len(step.skewed_us) == len(cost_table.SKEWS)
        assert list(step.skewed_us) == sorted(step.skewed_us)
        assert step.skewed_us[0] == step.predicted_us
    assert all(call.us > 0 for call in table.calls.values())
    exchange = next(call for name, call in table.calls.items() if "f32[64,16]" in name)
    assert exchange.num_bytes == 64 * 16 * 4 / 2


@pytest.mark.dist
def test_the_table_says_how_uneven_routing_was(table: CostTable) -> None:
    """Dispatch and combine, forward and backward, of one exchange and of two slices: 12. Of a row's
    two experts each may be on either rank, so that the busiest rank gets at most twice its share."""
    assert len(table.skews) == 12
    assert table.skews == tuple(sorted(table.skews))
    assert 1 < table.skews[-1] <= 2
    assert cost_table.SKEWS[0] == 1.0


@pytest.mark.dist
@pytest.mark.parametrize("slices", [1, 2])
def test_every_node_of_the_measured_program_has_a_measured_cost(path: str, slices: int) -> None:
    for report in run_ranks(use_block, 2, [path, path], BATCH, slices, timeout_s=200):
        assert " 0 scaled from another size" in report.costs and "formula" not in report.costs
        assert report.predicted_us > 0
        assert f"cost table {path}" in str(report)


@pytest.mark.dist
def test_the_table_picks_the_slices_whatever_the_batch(table: CostTable, tmp_path: Path) -> None:
    """Both numbers are far from what the formulas say of so small a block."""
    (program,) = table.programs
    for best in (1, 2):
        steps = {n: cost_table.Step(1.0 if n == best else 2.0, 1.0) for n in (1, 2)}
        found = tmp_path / f"{best}.json"
        dataclasses.replace(table, programs={program: steps}).save(found)
        reports = run_ranks(use_block, 2, [str(found)] * 2, 6, "auto", timeout_s=200)
        assert [report.slices for report in reports] == [best, best]


@pytest.mark.dist
def test_ranks_with_other_tables_stop_and_name_both(table: CostTable, tmp_path: Path) -> None:
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    other = dataclasses.replace(table, contention=0.5)
    for each, file in zip((table, other), files, strict=True):
        each.save(Path(file))
    message = "rank . and rank . decided differently: costs is [0-9a-f]{64} on rank . and"
    with pytest.raises(RankError, match=message):
        run_ranks(use_block, 2, files, BATCH, 2, timeout_s=200)


@pytest.mark.dist
def test_a_table_of_another_machine_stops_the_ranks(table: CostTable, tmp_path: Path) -> None:
    found = tmp_path / "other.json"
    place = dataclasses.replace(table.place, device="another processor")
    dataclasses.replace(table, place=place).save(found)
    message = "is from another place: device is 'another processor' in the table and"
    with pytest.raises(RankError, match=message):
        run_ranks(use_block, 2, [str(found)] * 2, BATCH, 2, timeout_s=200)


@pytest.mark.dist
def test_the_command_line_measures_a_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "moe.json"
    target = ["--measure", "models.moe:train_step", "--config", "toy"]
    argv = ["hardware", *target, "--link", "800", "--steps", "1", "-o", str(found), "--json"]
    assert cli.run(argv) == 0
    document = json.loads(capsys.readouterr().out)
    table = cost_table.load(str(found))
    assert document["sha256"] == table.digest
    assert table.place.link == "800 Mbit/s"
    assert [one["slices"] for one in document["programs"]] == [1, *choose.CANDIDATE_SLICES]
    # A fake job compiles for the machine of the table; another model has another graph.
    simulated = ["simulate", "models.moe:train_step", "--costs", str(found), "--json"]
    assert cli.run([*simulated, "--config", "toy"]) == 0
    assert cli.run([*simulated, "--config", "debug"]) == 2
    assert "is for another graph: program is" in capsys.readouterr().err


# --- timing one graph -----------------------------------------------------------------------------


def test_a_timed_graph_computes_the_same_and_times_every_call() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (x + y).split(2)
        return torch.relu(a) @ b.t(), x.sum()

    gm = trace(program, torch.zeros(4, 3), torch.zeros(4, 3))
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    seen, inputs = Seen(), [x, y]
    found = TimedGraph(gm, seen).run(inputs)
    assert inputs == []
    assert all(torch.equal(*pair) for pair in zip(found, program(x, y), strict=True))
    called = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert list(seen.calls_us) == called
    assert all(len(times) == 1 and times[0] > 0 for times in seen.calls_us.values())


def test_a_timed_graph_keeps_no_value_that_is_dead() -> None:
    """Two additions in a row: the first sum is gone when the second one is done."""
    gm = trace(lambda x: ((x + 1) + 2) + 3, torch.zeros(4))
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def note(x: Tensor, y: float) -> Tensor:
        alive.append(sum(ref() is not None for ref in made))
        result = x + y
        made.append(weakref.ref(result))
        return result

    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = note
    TimedGraph(gm, Seen()).run([torch.zeros(4)])
    assert alive == [0, 1, 1]
