"""How many slices the formula picks, that recompiles keep it, and what ranks compare."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from overlap import compilation
from overlap.compilation import Compilation, CompiledCollective
from overlap.config import Config
from overlap.inner.runs import eager
from overlap.runtime import agree


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


def compared(group: str, parameter: torch.nn.Parameter, slices: int = 2) -> Compilation:
    """A compilation of the parameter's module that is about to run."""
    record = Compilation.begin(Config(slices=slices), [parameter], structure="program")
    record.code = 0
    record.slices = slices
    starts = [CompiledCollective(name, "all_to_all", group, "moe", 0) for name in ("a", "b")]
    starts.append(dataclasses.replace(starts[0], group="dp"))
    record.compare_ranks("forward", starts, eager("forward", fx.GraphModule({}, fx.Graph())))
    return record


def test_every_group_compares_its_own_starts_and_copies_have_places_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, agree.Decided]] = []
    monkeypatch.setattr(agree, "compare", lambda *call: calls.append(call))
    monkeypatch.setattr(compilation, "_RECORDS", [])
    weight, copy = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    for parameter, slices in ((weight, 2), (copy, 4), (weight, 2)):
        compared("ep", parameter, slices)
    assert [key for key, _ in calls[::2]] == [f"{i}/program/forward" for i in (0, 1, 0)]
    options = {
        "slices": 2,
        "axis": "batch",
        "inner": "eager",
        "check_steps": 0,
        "costs": "none",
        "whole_step": False,
        "numerics": "reassociate",
        "certificate": "none",
    }
    starts = ["a (all_to_all slice 0 in moe)", "b (all_to_all slice 0 in moe)"]
    assert calls[0][1] == agree.Decided("ep", options, starts)
    assert calls[1][1] == agree.Decided("dp", options, starts[:1])


def test_a_program_of_another_group_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_RECORDS", [])
    weight, other = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    assert compared("ep", weight).places == {"ep": 0, "dp": 0}
    assert compared("tp", other).places == {"tp": 0, "dp": 1}


def test_a_store_out_of_reach_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise dist.DistStoreError("connection reset")

    monkeypatch.setattr(agree, "compare", fail)
    remarks = compared("ep", torch.nn.Parameter(torch.zeros(1))).remarks
    assert "did not compare what they decided for group 'ep': connection reset" in str(remarks[0])
