"""How many slices the formula picks, and that recompiles keep it."""

from __future__ import annotations

import pytest
import torch

from overlap.compilation import CANDIDATE_SLICES, Compilation, Load
from overlap.config import Config


@pytest.mark.parametrize(
    ("load", "slices"),
    [
        (Load(compute_us=1e5, launch_us=1e3, comm_us=0, latency_us=0), 1),
        (Load(compute_us=1e5, launch_us=1e3, comm_us=1e5, latency_us=1e2), 4),
        (Load(compute_us=1e5, launch_us=1e3, comm_us=1e4, latency_us=1e2), 2),
        (Load(compute_us=1e3, launch_us=1e5, comm_us=1e4, latency_us=1e2), 1),
    ],
    ids=["no communication", "equal", "little communication", "launch bound"],
)
def test_the_formula_weighs_what_is_hidden_against_what_slicing_costs(
    load: Load, slices: int
) -> None:
    assert min(CANDIDATE_SLICES, key=load.predicted_us) == slices


def test_only_the_same_code_of_the_same_module_shares_a_decision() -> None:
    weight, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))

    def record(parameter: torch.nn.Parameter, code: int = 0, slices: int | str = "auto"):
        made = Compilation.begin(Config(slices=slices), [parameter])
        made.code = code
        return made

    first = record(weight)
    assert first.is_same_code(record(weight))
    assert not first.is_same_code(record(other))
    assert not first.is_same_code(record(weight, code=1))
    assert not first.is_same_code(record(weight, slices=2))
