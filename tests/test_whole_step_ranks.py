"""Forward, loss and backward as one graph on two gloo ranks, beside the program as written.

Shape suffixes: B batch   S sequence   D model width
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlap import compilation
from overlap.errors import DivergenceError, RankError
from tests.dist import run_ranks
from tests.test_training_uses import DIM, ROUNDING, SEQ, VOCAB, make_block, make_transformer, worst

pytestmark = pytest.mark.dist


class BlockLoss(nn.Module):
    """The mean over rows of a sum that weighs every element differently."""

    def __init__(self) -> None:
        super().__init__()
        self.block = make_block()

    def forward(self, x_BSD: Tensor, weight_BSD: Tensor) -> Tensor:
        return (self.block(x_BSD) * weight_BSD).sum() / x_BSD.shape[0]


class TokenLoss(nn.Module):
    """The mean cross-entropy of the next token; the last layer runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_transformer()

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV = checkpoint(self.model, tokens_BS, use_reentrant=False)
        assert isinstance(logits_BSV, Tensor)
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


class SquareLoss(BlockLoss):
    """The same of squares, whose gradients need the forward."""

    def forward(self, x_BSD: Tensor, weight_BSD: Tensor) -> Tensor:
        return (self.block(x_BSD).square() * weight_BSD).sum() / x_BSD.shape[0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of each backward: (loss, as written), and the error of gradients against fp64, (own, as
    written); what was compiled and remarked."""

    losses: list[tuple[float, float]]
    errors: list[tuple[float, float]]
    kinds: list[str]
    starts: list[str]
    remarks: list[str]


def outcome(
    losses: list[Any], errors: list[Any], record: compilation.Compilation | None = None
) -> Outcome:
    """`record`: the last one, unless given."""
    record = record or compilation.records()[-1]
    return Outcome(
        losses,
        errors,
        [one.kind for one in record.graphs],
        [str(start) for one in record.graphs for start in one.collectives],
        [str(remark) for remark in record.remarks],
    )


def compiled(module: nn.Module, **options: Any) -> Any:
    given = {"slices": 2, "whole_step": True} | options
    return torch.compile(module, backend="overlap", fullgraph=True, options=given)


def gradients(module: nn.Module) -> list[Tensor]:
    """Taken from the module."""
    found = [p.grad.double() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def rows(seed: int, num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    shape = (2, num_rows, SEQ, DIM)
    x_BSD, weight_BSD = torch.randn(shape, generator=generator)
    return x_BSD, weight_BSD


def train_block(rank: int, num_ranks: int) -> Outcome:
    """Accumulated gradients of batches of several sizes, the first call checked; then ranks that
    weigh their losses differently."""
    written = BlockLoss()
    own, exact = copy.deepcopy(written), copy.deepcopy(written).double()
    step = compiled(own, check_steps=1)
    losses: list[tuple[float, float]] = []
    errors: list[tuple[float, float]] = []
    for sizes in ((8,), (8, 9 - rank), (5, 8)):
        for size in sizes:
            x_BSD, weight_BSD = rows(size, size)
            pair = step(x_BSD, weight_BSD), written(x_BSD, weight_BSD)
            for loss in (*pair, exact(x_BSD.double(), weight_BSD.double())):
                (loss / (3 * len(sizes))).backward()
            losses.append((pair[0].item(), pair[1].item()))
        found, as_written, expected = map(gradients, (own, written, exact))
        errors.append((worst(found, expected), worst(as_written, expected)))
    with pytest.raises(DivergenceError, match="scale their losses differently"):
        (step(*rows(8, 8)) * (1 + rank)).backward()
    return outcome(losses, errors)


def check(found: Outcome, rounding: float = ROUNDING[torch.float32]) -> None:
    assert {"step", "scale"} == set(found.kinds)
    assert not [remark for remark in found.remarks if "refused" in remark]
    for error, as_written in found.errors:
        assert as_written < rounding
        assert error <= 2 * as_written + 1e-7
    for loss, as_written in found.losses:
        assert loss == pytest.approx(as_written, rel=1e-5)


def test_accumulated_gradients_of_several_batches() -> None:
    first, second = run_ranks(train_block, 2, timeout_s=280)
    check(first)
    check(second)
    assert first.losses[0][0] == first.losses[0][1]
    assert first.starts == second.starts


MEET = "axis='batch' keeps slices apart"
"""Of a remark where slices meet between forward and backward."""


def train_steps(rank: int, num_ranks: int, axis: str) -> tuple[Outcome, list[str]]:
    """Steps of an optimizer, each of two batches whose losses are scaled by 3, with a validation
    without gradients after each. The kinds of all graphs beside."""
    written = SquareLoss()
    own, exact = copy.deepcopy(written), copy.deepcopy(written).double()
    step = compiled(own, axis=axis)
    losses: list[tuple[float, float]] = []
    errors: list[tuple[float, float]] = []
    for seed in range(3):
        found: list[list[Tensor]] = []
        validated: list[float] = []
        for module, call in ((own, step), (written, written), (exact, exact)):
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
            dtype = torch.float64 if module is exact else torch.float32
            batches = [[x.to(dtype) for x in rows(2 * seed + i, 8)] for i in range(2)]
            for batch in batches:
                (3.0 * call(*batch)).backward()
            optimizer.step()
            found.append(gradients(module))
            with torch.no_grad():
                validated.append(call(*batches[0]).item())
        losses.append((validated[0], validated[1]))
        errors.append((worst(found[0], found[2]), worst(found[1], found[2])))
    kinds = [one.kind for record in compilation.records() for one in record.graphs]
    trained = next(record for record in compilation.records() if record.is_whole_step)
    return outcome(losses, errors, trained), kinds


@pytest.mark.parametrize(
    "axis", ["batch", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("token", "expert"))]
)
def test_steps_of_an_optimizer_along_every_axis(axis: str) -> None:
    for found, kinds in run_ranks(train_steps, 2, axis, timeout_s=280):
        check(found, rounding=1e-5)  # of weights that have drifted apart as well
        assert kinds == ["step", "scale", "inference"]
        assert any("slice 1" in start for start in found.starts)
        assert any(MEET in remark for remark in found.remarks) == (axis != "batch")


def train_tokens(rank: int, num_ranks: int) -> Outcome:
    """Under autocast, with a GradScaler whose scale is no power of two."""
    written = TokenLoss()
    own, exact = copy.deepcopy(written), copy.deepcopy(written).double()
    step = compiled(own)
    losses: list[tuple[float, float]] = []
    errors: list[tuple[float, float]] = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        tokens_BS = torch.randint(0, VOCAB, (8, SEQ + 1), generator=generator)
        batch = tokens_BS[:, :-1], tokens_BS[:, 1:]
        found: list[list[Tensor]] = []
        pair: list[float] = []
        for module, call in ((own, step), (written, written), (exact, exact)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
            with torch.autocast("cpu", torch.bfloat16, enabled=module is not exact):
                loss = call(*batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found.append(gradients(module))
            pair.append(loss.item())
        losses.append((pair[0], pair[1]))
        errors.append((worst(found[0], found[2]), worst(found[1], found[2])))
    return outcome(losses, errors)


@pytest.mark.slow
def test_a_checkpointed_model_under_autocast_and_a_grad_scaler() -> None:
    for found in run_ranks(train_tokens, 2, timeout_s=280):
        check(found, ROUNDING[torch.bfloat16])
        assert any("runs again in the backward" in remark for remark in found.remarks)


def disagree(rank: int, num_ranks: int) -> None:
    compiled(BlockLoss(), slices=1, whole_step=rank == 0)(*rows(0, 4)).backward()


def test_ranks_with_and_without_a_whole_step_stop_instead_of_hanging() -> None:
    difference = "whole_step is (True|False) on rank . and (True|False) on rank ."
    with pytest.raises(RankError, match=f"rank . and rank . decided differently: {difference}"):
        run_ranks(disagree, 2, timeout_s=100)
