"""The demo: it sums up right, runs on real ranks, and ends cleanly when it is disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    figures = demo.StepFigures(step_ms, step_ms - 20, 100.0, exposed_ms, 1 - exposed_ms / 100)
    return VariantRun([figures] * 2 * BLOCK_STEPS, losses, 9.0, 10**8, 2.5, measured, 171.0)


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
    assert found["overlap"]["num_equal_losses"] == 2
    assert found["link"] == {"kind": "emulated", "mbit": 200.0}


def test_the_table_says_that_the_link_is_emulated():
    texts = [demo_view.title(result()), *demo_view.notes(result())]
    assert "link emulated at 200 Mbit/s" in texts[0]
    assert "the link is emulated" in texts[1]
    rows = {row[0]: row for row in demo_view.grid(result()).rows}
    assert rows["overlap"][5:7] == ("90 %", "1.50x (1.50-1.50)")


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


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `overlap demo` on a toy model; what it writes goes to `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "overlap.cli", "demo", "--config", "toy", *argv]
        process = subprocess.Popen(
            [*command, "--report", str(tmp_path / "report.html")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OVERLAP_VERIFY": ""},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def running(process: subprocess.Popen[str]) -> list[str]:
    """The processes of the session that `process` leads, as `pid command`, oldest first."""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,stat=,args=", "--sort=pid", "-s", str(process.pid)],
        capture_output=True,
        text=True,
    )
    fields = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return [f"{pid} {command}" for pid, state, command in fields if not state.startswith("Z")]


def assert_all_end(process: subprocess.Popen[str]) -> None:
    """Nothing of the session outlives its leader by more than a moment."""
    deadline = time.monotonic() + 3
    while (left := running(process)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, which are started in order."""
    return [int(line.split()[0]) for line in running(process) if "spawn_main" in line]


def until_compiling(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if "compiling" in line:
            return seen
    raise AssertionError(f"the demo never came to compile:\n{seen}")


@pytest.mark.dist
def test_one_rank_has_nothing_to_hide(start: Start):
    process = start("--ranks", "1", "--steps", "4", "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["overlap"]["comm_ms"]["median"] == 0 and found["overlap"]["hidden"] == 0
    assert found["max_loss_diff"] == 0


@pytest.mark.dist
def test_two_ranks(start: Start, tmp_path: Path):
    process = start("--steps", "4", "--slices", "2", "--json")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found.keys() >= KEYS and found["slices"] == 2
    assert found["overlap"]["first_loss_diff"] == 0
    assert found["max_loss_diff"] < 1e-3
    assert found["overlap"]["comm_ms"]["median"] > 0
    assert "emulated" in (tmp_path / "report.html").read_text()


@pytest.mark.dist
def test_a_killed_rank_is_named(start: Start):
    process = start()
    until_compiling(process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert_all_end(process)


@pytest.mark.dist
def test_an_interrupt_leaves_nothing_behind(start: Start):
    process = start()
    until_compiling(process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "overlap: interrupted" in err and "Traceback" not in err
    assert_all_end(process)
