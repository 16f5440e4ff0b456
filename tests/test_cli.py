"""The command line: exit codes, JSON alone on standard output, what wrong use is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlap import cli, demo
from overlap.errors import DivergenceError

TOY = ["models.moe:train_step", "--config", "toy", "--slices", "2"]


def run(*argv: str) -> int:
    try:
        return cli.run(argv)
    except SystemExit as left:  # argument parsing ends the program
        assert isinstance(left.code, int)
        return left.code


def test_help_names_the_verbs(capsys: pytest.CaptureFixture[str]):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("demo", "explain", "simulate", "passes", "hardware"))


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dmeo"],
        ["demo", "--stepz", "3"],
        ["demo", "--link", "-1"],
        ["demo", "--steps", "0"],
        ["demo", "--slices", "0"],
        ["demo", "--config", "toyy"],
        ["explain", "models.moe:train_stp"],
        ["explain", "models.mo:train_step"],
        ["explain", "models.moe:train_step", "--config", "tiny"],
        ["explain", "models.moe:train_step", "--mesh", "dp"],
        ["explain", "models.moe:train_step", "--mesh", "dp=2", "--world", "2"],
        ["simulate", "models.moe:train_step", "--hardware", "h101"],
        ["hardware", "h101"],
        ["hardware", "--measure"],
    ],
)
def test_wrong_use_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err


def test_ranks_that_differ_are_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run_demo(_: demo.DemoOptions) -> None:
        raise DivergenceError("rank 0 and rank 1 decided differently")

    monkeypatch.setattr(demo, "run", run_demo)
    assert run("demo") == 4
    assert capsys.readouterr().err == "DivergenceError: rank 0 and rank 1 decided differently\n"


def test_the_nearest_name_is_given(capsys: pytest.CaptureFixture[str]):
    assert run("hardware", "h101", "--json") == 2
    assert "did you mean 'h100'?" in capsys.readouterr().err


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert run(*argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_passes(capsys: pytest.CaptureFixture[str]):
    found = document(capsys, "passes")
    assert found["passes"]["schedule"].startswith("nodes move")
    assert found["presets"]["moe"]["final"] == "schedule,legalize"
    assert run("passes") == 0
    assert "merge_wgrad" in capsys.readouterr().out


def test_hardware(capsys: pytest.CaptureFixture[str]):
    assert "h100" in [profile["name"] for profile in document(capsys, "hardware")]
    assert document(capsys, "hardware", "h200")["memory_gbps"] == 4800.0
    assert run("hardware") == 0 and run("hardware", "cpu") == 0


def test_explain(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    page = tmp_path / "explain.html"
    found = document(capsys, "explain", *TOY, "--axis", "batch", "--html", str(page))
    assert found["slices"] == 2 and found["profile"] == "cpu"
    assert len(found["collectives"]) == 10
    assert page.read_text().startswith("<!doctype html>")


def test_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    trace = tmp_path / "trace.json"
    found = document(capsys, "simulate", *TOY, "--world", "64", "--trace", str(trace))
    assert found["mesh"] == {"dp": 64} and found["profile"] == "h100"
    assert [program["name"] for program in found["programs"]] == [
        "as written",
        "scheduled, 1 slice",
        "scheduled, 2 slices",
    ]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"M", "X"} == {event["ph"] for event in events}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_a_target_without_communication(capsys: pytest.CaptureFixture[str]):
    assert run("simulate", "models.llama:train_step", "--config", "toy") == 0
    assert "no collective" in capsys.readouterr().out
