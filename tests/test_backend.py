"""The backend against the program as written, on gloo ranks, over several steps."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models import DeepSeekV3, DeepSeekV3Config
from overlap import compilation
from tests.dist import run_ranks

pytestmark = pytest.mark.dist

TOY = dataclasses.replace(
    DeepSeekV3Config.toy(),
    num_layers=1,
    num_dense=0,
    # As wide as two vectors: silu rounds the remainder of a row otherwise.
    moe=dataclasses.replace(DeepSeekV3Config.toy().moe, hidden_dim=32),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One comparison: how the model is compiled, and what its ranks feed it.

    favoured: experts that get every token; the others get none.
    rows: batch rows per step; one entry a step.
    layers: MoE layers.
    """

    slices: int | str
    rows: tuple[int, ...] = (8, 8, 8)
    favoured: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    layers: int = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one rank saw: are the losses the same bits, the worst gradient error of both programs
    against fp64 relative to the largest gradient, and the per-group order of the collectives."""

    is_bitwise: bool
    loss_error: float
    error: float
    error_as_written: float
    counts: list[int]
    counts_as_written: list[int]
    starts: list[tuple[str, ...]]
    remarks: list[str]


def make_model(job: Job, num_ranks: int) -> DeepSeekV3:
    config = dataclasses.replace(TOY, num_layers=job.layers)
    if TOY.moe.num_experts % num_ranks:
        config = dataclasses.replace(
            config, moe=dataclasses.replace(TOY.moe, num_experts=2 * num_ranks)
        )
    model = DeepSeekV3(config, dist.group.WORLD)
    for layer in model.moe_layers():
        for expert in job.favoured:
            layer.router.bias_E[expert] = 9.0
    return model.to(job.dtype)


def weighted(logits_BSV: Tensor, seed: int) -> Tensor:
    """Terms of a loss that tells rows apart: every logit has its own weight."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(logits_BSV.shape, generator=generator, dtype=torch.float64)
    return logits_BSV.double() * weight / logits_BSV.shape[0]


def train(
    step: Any, model: DeepSeekV3, job: Job, rank: int
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Losses of every step, gradients of the first, and the size of the last loss's terms.

    The terms cancel, so it is their summed size that a difference of two losses is measured by.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    size = torch.zeros(())
    for i, rows in enumerate(job.rows):
        generator = torch.Generator().manual_seed(100 * i + rank)
        tokens = torch.randint(0, 256, (rows, 16), generator=generator)
        terms = weighted(step(tokens), seed=1000 * i + rank)
        size = terms.detach().abs().sum()
        loss = terms.sum()
        loss.backward()
        if i == 0:
            gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, size


def counts_of(model: DeepSeekV3) -> list[int]:
    return [int(c) for layer in model.moe_layers() for c in layer.tokens_per_expert]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    largest = max(g.abs().max() for g in expected)
    return max(float((a - b).abs().max() / largest) for a, b in zip(found, expected, strict=True))


def compare(rank: int, num_ranks: int, job: Job) -> Outcome:
    model = make_model(job, num_ranks)
    own = copy.deepcopy(model)
    exact = copy.deepcopy(model).double()
    options = {"slices": job.slices, "axis": "batch"}
    step = torch.compile(own, backend="overlap", fullgraph=True, options=options)
    losses, gradients, _ = train(step, own, job, rank)
    expected, gradients_as_written, size = train(model, model, job, rank)
    first = dataclasses.replace(job, rows=job.rows[:1])
    _, reference, _ = train(exact, exact, first, rank)
    graphs = [g for record in compilation.records() for g in record.graphs]
    return Outcome(
        is_bitwise=all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True)),
        loss_error=float(abs(losses[-1] - expected[-1]) / size),
        error=worst(gradients, reference),
        error_as_written=worst(gradients_as_written, reference),
        counts=counts_of(own),
        counts_as_written=counts_of(model),
        starts=[
            tuple(graph.scheduled.start_order) for graph in graphs if graph.scheduled is not None
        ],
        remarks=[str(r) for record in compilation.records() for r in record.remarks],
    )


def check_gradients(outcome: Outcome) -> None:
    assert outcome.error <= 2 * outcome.error_as_written + 1e-7
    assert outcome.counts == outcome.counts_as_written


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_first_loss_is_bitwise_and_gradients_within_rounding(slices: int) -> None:
    for outcome in run_ranks(compare, 2, Job(slices, rows=(8,)), timeout_s=280):
        assert outcome.is_bitwise
        check_gradients(outcome)
        assert not [r for r in outcome.remarks if "refused" in r]


def test_slices_stay_apart_across_layers() -> None:
    for outcome in run_ranks(compare, 2, Job(slices=2, rows=(8,), layers=2), timeout_s=280):
        assert outcome.is_bitwise
        check_gradients(outcome)


def test_uneven_cuts_over_several_steps_and_batch_sizes() -> None:
    job = Job(slices=3, rows=(7, 8, 5, 2))
    for outcome in run_ranks(compare, 2, job, timeout_s=280):
        assert outcome.loss_error < 1e-6
        check_gradients(outcome)


@pytest.mark.slow
def test_four_ranks() -> None:
    for outcome in run_ranks(compare, 4, Job(slices=2), timeout_s=280):
        assert outcome.loss_error < 1e-6
        check_gradients(outcome)


@pytest.mark.parametrize("favoured", [(0, 2), (0, 1)], ids=["starved experts", "starved rank"])
def test_experts_without_tokens(favoured: tuple[int, ...]) -> None:
    for outcome in run_ranks(
        compare, 2, Job(slices=2, rows=(4,), favoured=favoured), timeout_s=280
    ):
        assert outcome.is_bitwise
        check_gradients(outcome)


def compare_unequal(rank: int, num_ranks: int) -> Outcome:
    """Ranks with other batches; rank 1 also recompiles for a batch that it sees alone."""
    rows = (8, 8, 8) if rank == 0 else (3, 1, 6)
    return compare(rank, num_ranks, Job(slices=2, rows=rows))


def test_ranks_with_unequal_batches_run_one_order_of_collectives() -> None:
    outcomes = run_ranks(compare_unequal, 2, timeout_s=280)
    for outcome in outcomes:
        check_gradients(outcome)
        assert outcome.loss_error < 1e-6
    first, second = (set(outcome.starts) for outcome in outcomes)
    assert first == second


def modes(rank: int, num_ranks: int) -> list[tuple[float, float]]:
    """Train, evaluate under no_grad, switch modes and train again: (compiled, as written)."""
    model = make_model(Job(2), num_ranks)
    own = copy.deepcopy(model)
    step = torch.compile(
        own, backend="overlap", fullgraph=True, options={"slices": 2, "axis": "batch"}
    )
    tokens = torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(rank))
    pairs: list[tuple[float, float]] = []
    for is_training in (True, False, True):
        own.train(is_training)
        model.train(is_training)
        with torch.set_grad_enabled(is_training):
            pairs.append((step(tokens).sum().item(), model(tokens).sum().item()))
        pairs += zip(counts_of(own), counts_of(model), strict=True)
    return pairs


@pytest.mark.slow
def test_train_and_eval_switches() -> None:
    for pairs in run_ranks(modes, 2, timeout_s=280):
        for found, expected in pairs:
            assert found == expected
