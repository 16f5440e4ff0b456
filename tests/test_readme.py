"""The README: its code runs, its commands exist, its files are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import overlap
from overlap import cli, target
from overlap.target import MeshSpec

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line.partition("  #")[0] for block in blocks("sh") for line in block.splitlines()]
    inline = re.findall(r"`(overlap [^`]+)`", README)
    return [line.strip() for line in [*lines, *inline] if line.startswith("overlap ")]


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = target.make_step("models.deepseek_v3:train_step", "toy", MeshSpec.of_world(1))
    tokens, labels = step.example_inputs
    given: dict[str, Any] = {"model": step.loss_module(), "tokens": tokens, "labels": labels}
    names = given | {"torch": torch, "overlap": overlap, "__file__": str(tmp_path / "test_it.py")}
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(compile(block, str(tmp_path / "readme.py"), "exec"), names)
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    names["test_the_model_keeps_its_overlap"]()
    assert (tmp_path / "golden" / "model.graph").exists()


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str):
    try:
        cli.parse(shlex.split(command)[1:])
    except SystemExit as left:
        assert left.code == 0  # --help


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_it_is_one_page():
    assert len(README.splitlines()) < 120
