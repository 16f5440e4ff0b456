"""python -m tests.fuzz --programs 10000 --state fuzz.jsonl

Every program that was checked is a line of the state: how it ended, and what it was if it ended
badly. A second call goes on after the last line. Ends with 1 and the smallest failing program that
hypothesis finds in the chunk where one failed.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz import program as fuzz
from tests.fuzz.program import NoProgram, Program

CHUNK = 100


def run_chunk(number: int, count: int) -> list[dict[str, Any]]:
    """The lines of `count` programs of a chunk, which its number decides. Raises what the smallest
    of those that fail raises."""
    lines: list[dict[str, Any]] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(fuzz.programs())
    def check(program: Program) -> None:
        lines.append(line_of(program))

    check()
    return lines


def line_of(program: Program) -> dict[str, Any]:
    what: dict[str, Any] = {"kind": program.kind, "axis": program.axis, "exact": program.is_exact}
    try:
        outcome = fuzz.check(program)
    except NoProgram:
        return what | {"end": "no program"}
    end = "accepted" if outcome.is_accepted else "refused"
    return what | {"end": end, "rules": dict(outcome.rules)}


def show(lines: Iterable[dict[str, Any]]) -> None:
    ends: collections.Counter[str] = collections.Counter()
    rules: collections.Counter[str] = collections.Counter()
    for line in lines:
        exact = ", exact" if line["exact"] else ""
        ends[f"{line['end']}: {line['kind']} along {line['axis']}{exact}"] += 1
        rules.update(line.get("rules", {}))
    for name, count in sorted(ends.items()):
        print(f"{count:6}  {name}")
    print(f"{len(rules)} rules decided a node that slices compute")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--state", type=Path, default=Path("fuzz.jsonl"))
    options = parser.parse_args()
    while True:
        text = options.state.read_text() if options.state.exists() else ""
        lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        if len(lines) >= options.programs:
            show(lines)
            return 0
        number = 1 + max((line["chunk"] for line in lines), default=-1)
        found = run_chunk(number, min(CHUNK, options.programs - len(lines)))
        with options.state.open("a") as state:
            state.writelines(json.dumps({"chunk": number} | line) + "\n" for line in found)


if __name__ == "__main__":
    raise SystemExit(main())
