"""Rules broken on purpose: a program that uses the broken rule has to fail, or to be refused.

Each mutation changes every decision of one rule the same way. It is found where a program of the
corpus computes something else, does not run, or is not accepted any more because the prover or the
instantiation sees a contradiction. It survives where a program has used it and computes the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Generator, Iterable
from unittest import mock

import torch
from torch import fx

from overlap import graph
from overlap import placement as pl
from overlap.placement import Decision, Op, Partial, Split
from tests.fuzz import program as fuzz
from tests.fuzz.program import NoProgram, Program

HARMLESS: dict[str, set[str]] = {}
"""By rule, what breaking it changes nothing in the programs of the corpus."""


class Verdict(enum.Enum):
    FOUND = "found"
    CONTRADICTED = "the prover refuses what it says, and computes the node once"
    SURVIVED = "survived"
    UNUSED = "no decision of the corpus is changed by it"


Change = Callable[[Op, Decision], Decision]


def _other_dim(op: Op, decision: Decision) -> Decision:
    """Says that rows lie along the next dim."""
    match decision.placement:
        case Split(dim, rows, meaning) if len(op.shape) > 1:
            moved = Split((dim + 1) % len(op.shape), rows, meaning)
            return dataclasses.replace(decision, placement=moved)
    return decision


def _whole(op: Op, decision: Decision) -> Decision:
    """Says that every slice has all of it."""
    is_value = isinstance(graph.fake_value(op.node), torch.Tensor)
    if is_value and isinstance(decision.placement, Split | Partial):
        return dataclasses.replace(decision, placement=pl.WHOLE)
    return decision


def _rows_of_a_sum(op: Op, decision: Decision) -> Decision:
    """Takes a sum over rows for rows."""
    if isinstance(decision.placement, Partial) and op.shape:
        return dataclasses.replace(decision, placement=Split(0, pl.Base()))
    return decision


def _sizes_as_written(op: Op, decision: Decision) -> Decision:
    """Leaves sizes along the sliced dim as they were."""
    return dataclasses.replace(decision, replace={})


def _all_of_the_others(op: Op, decision: Decision) -> Decision:
    """Does not take a slice's own part of what is whole."""
    return dataclasses.replace(decision, narrow={})


CHANGES: dict[str, Change] = {
    change.__name__.strip("_"): change
    for change in (_other_dim, _whole, _rows_of_a_sum, _sizes_as_written, _all_of_the_others)
}


def _forgets_to_refuse(rule: pl.Rule, op: Op) -> Decision:
    """Goes on as if rows stayed apart, where the rule refuses."""
    try:
        return rule(op)
    except pl.Refusal:
        placed = [op.placements[node] for node in op.operands if node in op.placements]
        rows = next((place for place in placed if isinstance(place, Split)), None)
        value = graph.fake_value(op.node)
        if rows is None or not isinstance(value, torch.Tensor) or rows.dim >= value.dim():
            raise
        op.seen.update(op.operands)
        return Decision(Split(rows.dim, rows.rows))


@contextlib.contextmanager
def _broken(name: str, kind: str) -> Generator[set[fx.Node]]:
    """Breaks a rule; gives the nodes whose decision is another one."""
    changed: set[fx.Node] = set()
    find = pl.rule_for

    def rule_for(node: fx.Node) -> pl.Rule | None:
        rule = find(node)
        if rule is None or fuzz.name_of(rule) != name:
            return rule
        own = rule

        def mutant(op: Op) -> Decision:
            if kind == "forgets_to_refuse":
                try:
                    return own(op)
                except pl.Refusal:
                    decision = _forgets_to_refuse(own, op)
                    changed.add(op.node)
                    return decision
            decision = own(op)
            broken = CHANGES[kind](op, decision)
            if broken != decision:
                changed.add(op.node)
            return broken

        return mutant

    with mock.patch.object(pl, "rule_for", rule_for):
        yield changed


KINDS = (*CHANGES, "forgets_to_refuse")


def verdict(name: str, kind: str, corpus: Iterable[Program]) -> Verdict:
    """Whether some program of the corpus finds the mutation of a rule."""
    is_used = is_contradicted = False
    for program in corpus:
        with _broken(name, kind) as changed:
            try:
                outcome = fuzz.check(program)
            except NoProgram:
                continue
            except Exception:
                return Verdict.FOUND
        if changed and not outcome.is_accepted and kind != "forgets_to_refuse":
            return Verdict.FOUND
        if changed and outcome.is_accepted:
            is_used |= name in outcome.rules
            is_contradicted |= name not in outcome.rules
    if is_used:
        return Verdict.SURVIVED
    return Verdict.CONTRADICTED if is_contradicted else Verdict.UNUSED
