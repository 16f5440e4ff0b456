"""The fuzzer, short: random programs, a corpus that uses every rule, and rules that are broken."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from overlap import placement as pl
from tests.fuzz import mutations, program
from tests.fuzz.mutations import Verdict
from tests.fuzz.program import NoProgram, Program

CORPUS = tuple(
    Program.from_json(line)
    for line in Path(__file__).with_name("corpus.jsonl").read_text().splitlines()
)
RULES = sorted(
    {
        program.name_of(rule)
        for rule in pl.registered_rules().values()
        if rule.__module__.startswith("overlap.rules.")
    }
)
NEVER_SLICED = {
    "elementwise.random": "always refuses",
    "indexing.masked_select": "always refuses",
    "routing.other_collective": "always refuses",
    "contraction.batch_norm": "refuses in training; in evaluation it reads buffers, of which there are none here",
    "indexing.bincount": "its size is known to Dynamo only",
    "scalars.assertion": "only Dynamo writes it",
    "scalars.metadata_assertion": "only Dynamo writes it",
    "scalars.linear_scalar": "sizes are added where Dynamo keeps them as symbols",
    "scalars.other_scalar": "sizes are compared where Dynamo keeps them as symbols",
}
"""Rules that no program here is sliced by, and why; `tests/test_slice.py` and
`tests/test_rules_routing.py` are about those that are no refusals."""


def test_random_programs_compute_the_same() -> None:
    """And at least half of them are sliced."""
    ends: list[bool] = []

    @settings(
        max_examples=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(program.programs())
    def check(one: Program) -> None:
        with contextlib.suppress(NoProgram):
            ends.append(program.check(one).is_accepted)

    check()
    assert len(ends) > 15
    assert 2 * sum(ends) >= len(ends)


def test_corpus_is_accepted_and_uses_every_rule() -> None:
    outcomes = [program.check(one) for one in CORPUS]
    assert all(outcome.is_accepted for outcome in outcomes)
    used = {name for outcome in outcomes for name in outcome.rules}
    assert used == set(RULES) - NEVER_SLICED.keys()


def asking(name: str) -> Iterator[Program]:
    """Programs of the corpus that ask the rule, dense and short ones first."""
    for one in sorted(CORPUS, key=lambda one: (one.kind == "routed", len(one.steps))):
        if name in program.check(one).asked:
            yield one


def check_broken(name: str, most: int) -> None:
    """Each way to break a rule is found, or contradicted, by programs that ask it."""
    programs = list(itertools.islice(asking(name), most))
    verdicts = {kind: mutations.verdict(name, kind, programs) for kind in mutations.KINDS}
    assert Verdict.FOUND in verdicts.values(), verdicts
    survived = {kind for kind, verdict in verdicts.items() if verdict is Verdict.SURVIVED}
    assert survived == mutations.HARMLESS.get(name, set()), verdicts


def test_a_broken_rule_is_found() -> None:
    check_broken("shape.permute", most=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(RULES) - NEVER_SLICED.keys()))
def test_every_broken_rule_is_found(name: str) -> None:
    check_broken(name, most=6)
