"""The documentation lists what there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from overlap import presets, rules, verify

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def first_cells(file: str, pattern: str) -> list[str]:
    """What `pattern` finds in the first cell of each row of the file's tables."""
    return re.findall(rf"^\| {pattern} \|", (DOCS / file).read_text(), re.MULTILINE)


def test_passes_are_all_listed():
    listed = first_cells("passes.md", r"`(\w+)`")
    assert sorted(listed) == sorted(presets.PASSES)


def test_the_phases_of_passes_are_right():
    text = (DOCS / "passes.md").read_text()
    for name, pass_ in presets.PASSES.items():
        default = {field.name: field.default for field in dataclasses.fields(pass_)}
        phases = f"{default['requires'].name}, {default['ensures'].name}"
        assert f"| `{name}` | {phases} | " in text


def test_rules_of_graphs_are_all_listed():
    rows = re.findall(r"^\| (V\d+) \| (\w+) \| (.*) \|$", (DOCS / "rules.md").read_text(), re.M)
    assert rows == [(rule.code, rule.phase.name, rule.statement) for rule in verify.RULES]


def test_rules_of_operators_are_all_listed():
    files = [path.stem for path in Path(rules.__path__[0]).glob("[a-z]*.py")]
    headings = re.findall(r"^### `(\w+)`", (DOCS / "rules.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(files)


@pytest.mark.parametrize("path", [*DOCS.rglob("*.md"), *ROOT.glob("*.md")], ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_decisions_are_numbered_and_complete():
    for number, path in enumerate(sorted((DOCS / "adr").glob("*.md")), start=1):
        text = path.read_text()
        assert path.name.startswith(f"{number:04d}-")
        assert text.startswith(f"# {number}. ")
        for section in ("Context", "Decision", "Consequences", "Alternatives"):
            assert f"\n## {section}\n" in text
