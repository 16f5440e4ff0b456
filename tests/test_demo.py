"""The demo: it sums up right, runs on real ranks, and ends cleanly when it is disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from overlap import demo, demo_view, report
from overlap.demo import BLOCK_STEPS, EAGER, OVERLAP, UNSLICED, DemoOptions, RankRun, VariantRun
from overlap.errors import ConfigError
from overlap.runtime.link import Record, Recording

ROOT = Path(__file__).parents[1]
KEYS = {"eager", "overlap", "speedup", "max_loss_diff", "slices", "numerics", "peak_bytes"}


def variant(step_ms: float, exposed_ms: float, losses: list[float]) -> VariantRun:
    """A variant all of whose steps take as long, 100 ms of them on the link."""
    record = Record("all_to_all", "0", 5e6, 0.0, 0.0, 0.1, 0.1 - exposed_ms / 1e3, 0.1)
    measured = report.measured_step(Recording([record]), 0.0, forward=0.1, optimizer=step_ms / 1e3)
    figures = demo.StepFigures(step_ms, 100.0, exposed_ms, 1 - exposed_ms / 100)
    return VariantRun([figures] * 2 * BLOCK_STEPS, losses, 9.0, 10**8, 2.5, measured)


def result(num_ranks: int = 2) -> demo.DemoResult:
    rank = RankRun(
        {
            EAGER: variant(300.0, 100.0, [3.0, 2.0, 1.0]),
            OVERLAP: variant(200.0, 10.0, [3.0, 2.0, 1.5]),
            UNSLICED: variant(250.0, 60.0, [3.0, 2.0, 1.0]),
        },
        report=None,
    )
    return demo.summarize(DemoOptions(num_ranks=num_ranks, steps=8), [rank] * num_ranks)


def test_what_the_json_holds():
    found = json.loads(json.dumps(result().to_json()))
    assert found.keys() >= KEYS
    for name in ("eager", "overlap"):
        for figure in ("step_ms", "comm_ms", "exposed_ms"):
            assert found[name][figure].keys() == {"min", "q1", "median"}
    assert found["eager"]["step_ms"]["median"] == 300.0
    assert found["speedup"] == pytest.approx(1.5)
    assert found["overlap"]["hidden"] == pytest.approx(0.9)
    assert found["max_loss_diff"] == 0.5
    assert found["link"] == {"kind": "emulated", "mbit": 400.0}


def test_the_table_says_that_the_link_is_emulated():
    texts = [demo_view.title(result()), *demo_view.notes(result())]
    assert "link emulated at 400 Mbit/s" in texts[0]
    assert "the link is emulated" in texts[1]
    rows = {row[0]: row for row in demo_view.grid(result()).rows}
    assert rows["overlap"][4:6] == ("90 %", "1.50x (1.50-1.50)")


def test_page_and_picture():
    assert "emulated" in demo_view.page(result())
    assert demo_view.picture(result()).startswith("<svg")


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"num_ranks": 0}, {"link_mbit": 0.0}, {"slices": 0}]
)
def test_wrong_options(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        DemoOptions(**wrong)


# ---- on ranks -----------------------------------------------------------------------------------


def start(tmp_path: Path, *argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "overlap.cli", "demo", "--config", "toy", *argv]
    return subprocess.Popen(
        [*command, "--report", str(tmp_path / "report.html")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OVERLAP_VERIFY": ""},
        start_new_session=True,
    )


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks by rank, once each has come to train."""
    found: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = status.read_bytes().decode(errors="replace").split("\0")
            session = int((status.parent / "stat").read_text().rpartition(")")[2].split()[3])
        except OSError:
            continue
        rank = [line.removeprefix("RANK=") for line in text if line.startswith("RANK=")]
        if session == process.pid and rank:
            found[int(rank[0])] = int(status.parent.name)
    return found


def until_compiling(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if "compiling" in line:
            return seen
    raise AssertionError(f"the demo never came to compile:\n{seen}")


def left_over(process: subprocess.Popen[str]) -> list[str]:
    """What is still running of the process's session."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=,args=", "-s", str(process.pid)], capture_output=True, text=True
    )
    return [line for line in listed.stdout.splitlines() if " Z" not in line]


@pytest.mark.dist
def test_one_rank_has_nothing_to_hide(tmp_path: Path):
    process = start(tmp_path, "--ranks", "1", "--steps", "4", "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["overlap"]["comm_ms"]["median"] == 0 and found["overlap"]["hidden"] == 0
    assert found["max_loss_diff"] == 0


@pytest.mark.dist
def test_two_ranks(tmp_path: Path):
    process = start(tmp_path, "--steps", "4", "--slices", "2", "--json")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found.keys() >= KEYS and found["slices"] == 2
    assert found["overlap"]["first_loss_diff"] == 0
    assert found["max_loss_diff"] < 1e-3
    assert found["overlap"]["comm_ms"]["median"] > 0
    assert "emulated" in (tmp_path / "report.html").read_text()


@pytest.mark.dist
def test_a_killed_rank_is_named(tmp_path: Path):
    process = start(tmp_path)
    until_compiling(process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert left_over(process) == []


@pytest.mark.dist
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path):
    process = start(tmp_path)
    until_compiling(process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "overlap: interrupted" in err and "Traceback" not in err
    assert left_over(process) == []
