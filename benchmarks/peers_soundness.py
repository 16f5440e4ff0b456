"""Which programs are accepted for slicing, by us and by TorchTitan, and how many of them go wrong.

The programs of tests/test_soundness.py, in two slices, against themselves as written: outputs, a
loss that weighs every element differently, all gradients and buffers. A program counts as accepted
if anything of it is sliced; ours computes once what it may not slice, and slices the rest.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import peers_titan
from tests.sliced import check_same, compare, run
from tests.test_soundness import PROGRAMS, Body, Program

CASE = "soundness"
BATCH = 8
SLICES = 2


def rows(names: Iterable[str] = PROGRAMS) -> list[dict[str, Any]]:
    """One row per compiler: `programs`, how many were `accepted`, and the names of the `wrong`."""
    names = list(names)
    result = [_row("overlap", names, _by_ours)]
    if not peers_titan.why_left_out():
        result.append(_row("TorchTitan eager, MoE", names, _by_titan))
    return result


def _row(variant: str, names: list[str], attempt: Callable[[Program], str]) -> dict[str, Any]:
    verdicts = {name: attempt(PROGRAMS[name]) for name in names}
    wrong = [name for name, verdict in verdicts.items() if verdict == "wrong"]
    num_accepted = sum(verdict != "refused" for verdict in verdicts.values())
    return {
        "case": CASE,
        "variant": variant,
        "programs": len(names),
        "accepted": num_accepted,
        "wrong": wrong,
    }


def _by_ours(program: Program) -> str:
    module = Body(program.fn, program.train)
    try:
        slicer = compare(module, [program.inputs(BATCH)], (SLICES,), True, program.rtol)
    except AssertionError:
        return "wrong"
    return "right" if slicer.num_sliced else "refused"


def _by_titan(program: Program) -> str:
    module, inputs = Body(program.fn, program.train), program.inputs(BATCH)
    written = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chunked = peers_titan.chunked(module)
        try:
            found = run(chunked, chunked, inputs)
        except (ValueError, TypeError, RuntimeError) as error:
            logging.getLogger(__name__).debug("refused: %s", error)
            return "refused"
        try:
            check_same(found, run(written, written, inputs), program.rtol)
        except AssertionError:
            return "wrong"
    return "right"
