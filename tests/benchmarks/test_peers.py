"""The comparison with torch's scheduler and TorchTitan: small programs, simulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers, peers_soundness, peers_titan, slicing
from models import LlamaConfig
from tests.dist import run_ranks

LINK_MBIT = 20.0
WHY_NOT = peers_titan.why_left_out()
TITAN = pytest.mark.skipif(bool(WHY_NOT), reason=f"TorchTitan: {WHY_NOT}")


def by_variant(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in rows}


@pytest.fixture(scope="module")
def moe() -> dict[str, dict[str, Any]]:
    return by_variant(list(peers.moe_rows(peers.TOY, LINK_MBIT, slices=(1, 2))))


@pytest.mark.slow
def test_ours_is_ahead_on_the_same_moe_graphs(moe: dict[str, dict[str, Any]]):
    for n in (1, 2):
        assert moe[f"overlap, N={n}"]["makespan"] < moe[f"torch, N={n}"]["makespan"]
    assert moe["overlap, N=2"]["exposed"] < moe["overlap, N=1"]["exposed"]
    assert moe["overlap, N=1"]["makespan"] < moe[peers.WRITTEN]["makespan"]


@pytest.mark.slow
def test_rows_have_all_that_is_compared(moe: dict[str, dict[str, Any]]):
    row = moe["overlap, N=2"]
    assert {"case", "variant", "makespan", "exposed", "peak_bytes", "seconds", "step_ms"} <= set(
        row
    )
    assert row["peak_bytes"] > 0 and row["seconds"] > 0 and row["step_ms"] is None
    assert peers.table(list(moe.values())).row_count == len(moe)


@pytest.mark.parametrize("load", [0.4, 1.2])
def test_ours_at_least_ties_on_fsdp(load: float):
    rows = by_variant(list(peers.fsdp_rows(LlamaConfig.toy(), (load,))))
    ours, theirs = rows["overlap, N=1"]["makespan"], rows["torch, N=1"]["makespan"]
    assert rows["bound"]["makespan"] <= ours <= theirs < rows[peers.WRITTEN]["makespan"]


def test_ours_accepts_no_program_that_goes_wrong():
    rows = by_variant(peers_soundness.rows(["linear_relu", "mean_over_rows"]))
    assert rows["overlap"]["accepted"] == 2 and rows["overlap"]["wrong"] == []
    assert peers.soundness_table(list(rows.values())).row_count == len(rows)


def test_without_torchtitan_its_rows_are_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(peers_titan, "why_left_out", lambda: "No module named 'torchtitan'")
    monkeypatch.setattr(peers, "CASES", (peers.TOY,))
    monkeypatch.setattr(peers, "SLICES", ())
    monkeypatch.setattr(peers, "fsdp_rows", lambda config: [])
    monkeypatch.setattr(peers_soundness, "rows", list)
    assert peers.main(["--json"]) == 0
    printed = capsys.readouterr()
    assert [row["note"] for row in json.loads(printed.out)] == [
        "left out: No module named 'torchtitan'"
    ]
    assert "pip install --no-deps torchtitan==0.3.0" in printed.err


@pytest.mark.slow
@TITAN
def test_ours_is_ahead_of_torchtitan(moe: dict[str, dict[str, Any]]):
    ours = moe["overlap, N=2"]
    theirs = [row for name, row in moe.items() if name.startswith("TorchTitan eager")]
    assert len(theirs) == 2
    assert all(ours["makespan"] < row["makespan"] for row in theirs)


@pytest.mark.slow
@TITAN
def test_the_strategy_that_fails_shows_its_error(moe: dict[str, dict[str, Any]]):
    row = moe["TorchTitan graph"]
    assert row["makespan"] is None and "Expected Proxy" in row["note"]


@TITAN
def test_torchtitan_accepts_programs_that_go_wrong():
    rows = by_variant(peers_soundness.rows(["linear_relu", "mean_over_rows", "entropy_none"]))
    assert rows["TorchTitan eager, MoE"] == {
        "case": peers_soundness.CASE,
        "variant": "TorchTitan eager, MoE",
        "programs": 3,
        "accepted": 2,
        "wrong": ["mean_over_rows"],
    }


def all_steps(rank: int, world: int, path: str) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Loss and gradients of the second step of each variant."""
    torch.manual_seed(0)
    results: dict[str, tuple[Tensor, list[Tensor]]] = {}
    seen: list[torch.nn.Module] = []

    def make(rank: int, world: int) -> tuple[torch.nn.Module, peers.Batch]:
        module, batch = peers.TOY.make(rank, world)
        seen.append(module)
        return module, batch

    case = peers.Case("toy", make, peers.TOY.roots)
    _, batch = peers.TOY.make(rank, world)
    steps: dict[str, Callable[..., Tensor]] = peers.make_steps(case, batch, path, slices=(1, 2))
    for (name, step), module in zip(steps.items(), seen, strict=True):
        loss = step(*batch)
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        results[name] = loss, gradients
    dist.barrier()
    return results


@pytest.mark.dist
@pytest.mark.slow
def test_measured_variants_compute_the_same(tmp_path: Any):
    path = slicing.profile_file(tmp_path, LINK_MBIT)
    for results in run_ranks(all_steps, 2, path, timeout_s=250):
        loss, gradients = results.pop(peers.WRITTEN)
        assert gradients and {"overlap, N=1", "overlap, N=2", "torch, N=2"} <= results.keys()
        for name, (other_loss, others) in results.items():
            torch.testing.assert_close(other_loss, loss, msg=lambda m, n=name: f"{n}: {m}")
            for gradient, other in zip(gradients, others, strict=True):
                error = (gradient - other).abs().max() / gradients[0].abs().max().clamp(min=1e-3)
                assert error < 1e-4, name
