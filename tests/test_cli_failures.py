"""`--json` when something is wrong: one JSON document or nothing on standard output, what is wrong on
standard error, and the exit code that the command line documents."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from overlap import cli, demo
from overlap.target import MeshSpec, Step

OK, FAILED, USAGE = 0, 1, 2
TOY = ["models.moe:train_step", "--config", "toy", "--slices", "2"]


# ---- targets ------------------------------------------------------------------------------------


def linear(config: str | None, mesh: MeshSpec) -> Step:
    """Nothing to slice: it compiles at once."""
    return Step(torch.nn.Linear(4, 4), F.mse_loss, (torch.ones(2, 4), torch.ones(2, 4)))


def prints(config: str | None, mesh: MeshSpec) -> Step:
    print("building the model")
    return linear(config, mesh)


def raises(config: str | None, mesh: MeshSpec) -> Step:
    raise FileNotFoundError("no data set here")


def returns_nothing(config: str | None, mesh: MeshSpec) -> None:
    return None


def takes_nothing() -> None:
    return None


def own(name: str) -> str:
    return f"{__name__}:{name}"


# ---- in one process -----------------------------------------------------------------------------


class Ran:
    """What one command left."""

    def __init__(self, capfd: pytest.CaptureFixture[str], *argv: str) -> None:
        try:
            self.code = cli.run([*argv, "--json"])
        except SystemExit as left:  # argument parsing ends the program
            assert isinstance(left.code, int)
            self.code = left.code
        except Exception:  # as the interpreter ends a program
            traceback.print_exc()
            self.code = FAILED
        self.out, self.err = capfd.readouterr()

    def document(self) -> Any:
        """The one that is on standard output; NaN and Infinity are no JSON."""

        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)

    def check_refused(self, code: int, words: str) -> None:
        assert (self.code, self.out) == (code, "")
        assert words in self.err


@pytest.mark.parametrize("verb", ["explain", "simulate"])
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "A training step"),
        (["models.moe"], "written as module:function"),
        (["models.moe:train_stp"], "did you mean 'train_step'"),
        (["models.mo:train_step"], "no module 'models.mo'"),
        ([own("returns_nothing")], "returns a NoneType"),
        ([own("takes_nothing")], "cannot be called with"),
        (["models.moe:train_step", "--config", "tiny"], "no config 'tiny'"),
        ([*TOY, "--mesh", "dp"], "a mesh is written as"),
        ([*TOY, "--world", "-1"], "a mesh has axes"),
        ([*TOY, "--mesh", "dp=2", "--world", "2"], "not both"),
        ([*TOY, "--hardware", "h101"], "no hardware profile 'h101'"),
        ([*TOY, "--hardware", "nowhere/h100.toml"], "cannot be read"),
        ([*TOY, "--memory-budget", "0.5"], "'memory_budget' expects"),
        ([*TOY, "--memory-budget", "nan"], "'memory_budget' expects"),
        (["models.moe:train_step", "--slices", "0"], "'slices' expects"),
        (["models.moe:train_step", "--slices", "two"], "two"),
        ([*TOY, "--bogus"], "--bogus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_prints_no_document(
    verb: str, argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Ran(capfd, verb, *argv).check_refused(USAGE, words)


@pytest.mark.parametrize("verb", ["explain", "simulate"])
def test_a_target_that_raises_is_a_failure(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    Ran(capfd, verb, own("raises")).check_refused(FAILED, "no data set here")
    ran = Ran(capfd, verb, own("linear"))  # nothing of the failed job is left
    assert ran.code == OK and ran.document()["slices"] == 1


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(demo, "launch", start)


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "tiny"], "no config 'tiny'"),
        (["--ranks", "0"], "ranks is 0"),
        (["--steps", "0"], "steps is 0"),
        (["--slices", "0"], "'slices' expects"),
        (["--slices", "two"], "two"),
        (["--link", "nan"], "bandwidth_mbit"),
        (["--link", "inf"], "bandwidth_mbit"),
        (["--report", "nowhere/report.html"], "folder that does not exist"),
        (["--svg", "nowhere/timeline.svg"], "folder that does not exist"),
        (["--bogus"], "--bogus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_demo_refuses_before_it_starts_ranks(
    argv: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Ran(capfd, "demo", *argv).check_refused(USAGE, words)


# ---- known to go wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["explain", "simulate"])
def test_what_a_target_prints_is_not_in_the_document(
    verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capfd, verb, own("prints"))
    assert ran.code == OK and ran.document()["slices"] == 1
    assert "building the model" in ran.err


@pytest.mark.parametrize(("verb", "option"), [("explain", "--html"), ("simulate", "--trace")])
def test_a_file_in_no_folder(verb: str, option: str, capfd: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capfd, verb, own("linear"), option, "nowhere/file")
    ran.check_refused(USAGE, "folder that does not exist")


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize("option", ["--report", "--svg"])
def test_a_folder_as_the_file_of_the_demo(
    option: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capfd, "demo", "--config", "toy", option, str(tmp_path))
    ran.check_refused(USAGE, "folder")


@pytest.mark.parametrize("argv", [["--world", "0"], ["--mesh", ""]])
def test_a_job_of_no_ranks(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    Ran(capfd, "simulate", own("linear"), *argv).check_refused(USAGE, "a mesh")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that takes no files")
def test_a_file_that_cannot_be_written(capfd: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capfd, "explain", own("linear"), "--html", "/proc/report.html")
    assert ran.code == FAILED and "report.html" in ran.err


def test_an_infinite_memory_budget(capfd: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capfd, "explain", own("linear"), "--memory-budget", "inf")
    ran.check_refused(USAGE, "'memory_budget' expects")


# ---- on ranks -----------------------------------------------------------------------------------


@pytest.mark.dist
def test_a_killed_rank_prints_no_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "overlap.cli", "demo", "--config", "toy", "--json"]
    process = subprocess.Popen(
        [*command, "--report", str(tmp_path / "report.html")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OVERLAP_VERIFY": ""},
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "compiling" in line:
                break
        listed = ["ps", "-ww", "-o", "pid=,args=", "--sort=pid", "-s", str(process.pid)]
        started = subprocess.run(listed, capture_output=True, text=True).stdout.splitlines()
        ranks = [int(line.split()[0]) for line in started if "spawn_main" in line]
        os.kill(ranks[0], signal.SIGKILL)  # the one that shows progress
        out, err = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == FAILED
    assert out == ""
    assert "rank 0 was killed by SIGKILL" in err
    assert not (tmp_path / "report.html").exists()
