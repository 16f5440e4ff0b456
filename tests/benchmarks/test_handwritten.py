"""The hand-written variants compute the same loss and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.handwritten import VARIANTS, Shape, make_batch, make_model, rows_of
from tests.dist import run_ranks

SMALL = Shape(batch=4, tokens=16, width=32, heads=4, expert_width=48, classes=20)


def all_variants(rank: int, world: int, shape: Shape) -> dict[str, tuple[Tensor, list[Tensor]]]:
    model, batch = make_model(shape, rank, world), make_batch(shape, rank)
    results: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for name, variant in VARIANTS.items():
        loss = variant.step(model, *batch)
        grads = [weight.grad for weight in model.weights()]
        assert all(grad is not None for grad in grads)
        results[name] = loss, [grad.clone() for grad in grads if grad is not None]
    return results


@pytest.mark.dist
@pytest.mark.parametrize("emulated", [False, True], ids=["gloo", "emulated"])
def test_variants_agree(emulated: bool):
    backend = "emulated" if emulated else "gloo"
    for results in run_ranks(all_variants, 2, SMALL, backend=backend):
        loss, grads = results["eager"]
        assert loss > 1
        assert all(grad.abs().max() > 0 for grad in grads)
        for name, (other_loss, other_grads) in results.items():
            torch.testing.assert_close(other_loss, loss, msg=lambda m, n=name: f"{n}: {m}")
            for grad, other in zip(grads, other_grads, strict=True):
                error = (grad - other).abs().max() / grad.abs().max()
                assert error < 1e-5, name


def test_rows_have_quartiles_and_speedups():
    steps_ms = {"eager": [4.0, 2.0, 3.0], "eager, p2p": [2.0] * 3, "sliced, N=2": [1.0] * 3}
    first, _, last = rows_of("case", steps_ms)
    assert first["step_ms"] == {"min": 2.0, "q1": 2.5, "median": 3.0}
    assert (last["speedup"], last["speedup_over_p2p"]) == (2.5, 2.0)
