"""How people train, through the backend and as written, on gloo ranks: accumulated gradients,
retained graphs, bf16, gradient scaling, fused optimizers, checkpoints, unequal batches.

Each use runs three times from the same weights: compiled, as written, and as written in fp64, which
tells what rounding is.

Shape suffixes: B batch   S sequence   D model width   V vocabulary   E experts
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from models import DeepSeekV3, DeepSeekV3Config, MoE, MoEBlock, MoEConfig
from overlap import compilation
from tests.dist import run_ranks

pytestmark = pytest.mark.dist

DIM, SEQ, VOCAB = 32, 16, 256
ROWS = 8
# As wide as two bf16 vectors: silu rounds the remainder of a row otherwise.
EXPERTS = MoEConfig(hidden_dim=64, num_experts=4, top_k=2)
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of the largest loss: what losses may differ by once weights were updated."""
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 5e-2}
"""What the program as written stays within; more would make the comparison with it mean nothing."""


# ---- models -------------------------------------------------------------------------------------


def scores_of(tokens: Tensor) -> Tensor:
    """Scores of the experts, far from a tie, in one of eight orders; [...] to [..., E]."""
    num_experts = EXPERTS.num_experts
    shift, step = tokens % num_experts, 1 + 2 * (tokens // num_experts % 2)
    order = torch.arange(num_experts) * step.unsqueeze(-1) + shift.unsqueeze(-1)
    return (order % num_experts) - (num_experts - 1) / 2


def route_clearly(moe: MoE) -> None:
    """The first channels of a token are its scores, so that no rounding changes a pick."""
    with torch.no_grad():
        weight_ED = moe.router.weight_ED
        weight_ED.add_(torch.eye(*weight_ED.shape))


def make_block() -> MoEBlock:
    """A block whose experts matter: what they add to a row is no smaller than its rounding."""
    block = MoEBlock(DIM, EXPERTS, dist.group.WORLD)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    route_clearly(block.moe)
    return block


def make_transformer() -> DeepSeekV3:
    toy = DeepSeekV3Config.toy()
    moe = dataclasses.replace(EXPERTS, num_shared=1)
    config = dataclasses.replace(toy, num_layers=1, num_dense=0, moe=moe)
    model = DeepSeekV3(config, dist.group.WORLD)
    with torch.no_grad():
        model.embedding.weight[:, : moe.num_experts] = scores_of(torch.arange(VOCAB))
    route_clearly(model.moe_layers()[0])
    return model


class Checkpointed(nn.Module):
    """A block that runs again in the backward, and a projection that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.block = make_block()
        self.head = nn.Linear(DIM, DIM, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(DIM))

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD = checkpoint(self.block, x_BSD, use_reentrant=False)
        assert isinstance(y_BSD, Tensor)
        return self.head(y_BSD)


# ---- programs and their data --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, how it is called, its state to start from, and the dtype of its data."""

    module: nn.Module
    step: Callable[[Tensor], Tensor]
    start: dict[str, Tensor]
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, step: Any, dtype: torch.dtype) -> Program:
        return cls(module, step, copy.deepcopy(module.state_dict()), dtype)

    @property
    def moes(self) -> list[MoE]:
        return [part for part in self.module.modules() if isinstance(part, MoE)]

    def restart(self) -> None:
        self.module.load_state_dict(self.start)
        self.module.zero_grad()
        for moe in self.moes:
            moe.tokens_per_expert.zero_()

    def gradients(self) -> list[Tensor]:
        """Of every parameter, a copy."""
        found = [p.grad for p in self.module.parameters() if p.grad is not None]
        return [gradient.to(torch.float64, copy=True) for gradient in found]

    def weights(self) -> list[Tensor]:
        """Of every parameter, a copy."""
        return [p.detach().to(torch.float64, copy=True) for p in self.module.parameters()]

    def counts(self) -> list[int]:
        return [int(count) for moe in self.moes for count in moe.tokens_per_expert]


def programs(module: nn.Module, slices: int, dtype: torch.dtype = torch.float32) -> list[Program]:
    """Compiled, as written, and as written in fp64."""
    written = module.to(dtype)
    own, exact = copy.deepcopy(written), copy.deepcopy(written).double()
    step = torch.compile(
        own, backend="overlap", fullgraph=True, options={"slices": slices, "axis": "batch"}
    )
    return [
        Program.of(own, step, dtype),
        Program.of(written, written, dtype),
        Program.of(exact, exact, torch.float64),
    ]


@dataclasses.dataclass(frozen=True)
class Data:
    """Batches of this rank, by number; `share` is its part of the rows of all ranks."""

    rows: int = ROWS
    is_tokens: bool = False
    share: float = 1.0

    def batch(self, index: int, dtype: torch.dtype) -> Tensor:
        generator = self.generator(index)
        tokens_BS = torch.randint(0, VOCAB, (self.rows, SEQ), generator=generator)
        if self.is_tokens:
            return tokens_BS
        x_BSD = torch.randn(self.rows, SEQ, DIM, generator=generator)
        x_BSD[..., : EXPERTS.num_experts] = scores_of(tokens_BS)
        return x_BSD.to(dtype)

    def loss(self, index: int, y_BSD: Tensor) -> Tensor:
        """Tells rows apart: every element has its own weight."""
        weight_BSD = torch.randn(y_BSD.shape, generator=self.generator(index), dtype=torch.float64)
        return (y_BSD.double() * weight_BSD).sum() / self.rows * self.share

    def generator(self, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(100 * index + dist.get_rank())


# ---- what is compared ---------------------------------------------------------------------------


@dataclasses.dataclass
class Trained:
    """What one program left: losses of every batch; gradients of every optimizer step and the final
    weights, by parameter; tokens per expert."""

    losses: list[float] = dataclasses.field(default_factory=list[float])
    gradients: list[list[Tensor]] = dataclasses.field(default_factory=list[list[Tensor]])
    weights: list[Tensor] = dataclasses.field(default_factory=list[Tensor])
    counts: list[int] = dataclasses.field(default_factory=list[int])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One use on one rank.

    errors: per optimizer step of the gradients, and last of the weights, against fp64; see `worst`.
    counts: tokens per expert: compiled, as written, in fp64.
    """

    losses: list[float]
    losses_as_written: list[float]
    errors: list[float]
    errors_as_written: list[float]
    counts: list[list[int]]


def worst(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest error of a parameter, relative to what that parameter has; NaN if one has NaN."""
    errors = [(a - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
    return float(torch.stack(errors).max())


def compare(use: Callable[[Program], Trained], three: Sequence[Program]) -> Outcome:
    trained: list[Trained] = []
    for program in three:
        program.restart()
        trained.append(use(program))
        trained[-1].weights = program.weights()
        trained[-1].counts = program.counts()
    own, written, exact = trained

    def errors(found: Trained) -> list[float]:
        pairs = zip(
            [*found.gradients, found.weights], [*exact.gradients, exact.weights], strict=True
        )
        return [worst(a, b) for a, b in pairs]

    return Outcome(
        own.losses,
        written.losses,
        errors(own),
        errors(written),
        [one.counts for one in trained],
    )


def check_rounding(outcome: Outcome, dtype: torch.dtype = torch.float32) -> None:
    """Losses, gradients and weights are those of the program as written, within rounding."""
    limit = LOSS_TOLERANCE[dtype] * max(map(abs, outcome.losses_as_written))
    for loss, expected in zip(outcome.losses, outcome.losses_as_written, strict=True):
        assert abs(loss - expected) <= limit
    for error, as_written in zip(outcome.errors, outcome.errors_as_written, strict=True):
        assert as_written < ROUNDING[dtype]
        assert error <= 2 * as_written + 1e-7


def check_counts(outcome: Outcome) -> None:
    """The same picks, so that errors tell of rounding alone."""
    own, written, exact = outcome.counts
    assert own == written == exact


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training loop: `num_batches` backwards before each step of the optimizer."""

    make_optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    num_steps: int = 3
    num_batches: int = 1
    set_to_none: bool = True
    data: Data = dataclasses.field(default_factory=Data)

    def __call__(self, program: Program) -> Trained:
        optimizer = self.make_optimizer(program.module.parameters())
        trained = Trained()
        for step in range(self.num_steps):
            for index in range(step * self.num_batches, (step + 1) * self.num_batches):
                loss = self.data.loss(index, program.step(self.data.batch(index, program.dtype)))
                loss.backward()
                trained.losses.append(loss.item())
            trained.gradients.append(program.gradients())
            optimizer.step()
            optimizer.zero_grad(set_to_none=self.set_to_none)
        return trained


def sgd(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1e-2)


def fused_adamw(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3, fused=True)


# ---- one compiled block, used in several ways ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Retained:
    """backward(retain_graph=True): the error, and the gradients after one and two backwards where
    torch is told to keep what the graph holds."""

    error: str
    once: list[Tensor]
    twice: list[Tensor]


def retain(program: Program) -> Retained:
    data = Data()
    program.restart()
    loss = data.loss(0, program.step(data.batch(0, program.dtype)))
    with pytest.raises(RuntimeError) as error:
        loss.backward(retain_graph=True)
    with functorch_config.patch(donated_buffer=False):
        loss.backward(retain_graph=True)
        once = program.gradients()
        loss.backward()
    return Retained(str(error.value), once, program.gradients())


@dataclasses.dataclass(frozen=True)
class Block:
    """What one rank saw of a block that was compiled once."""

    accumulated: Outcome
    fused: dict[bool, Outcome]
    fused_weights: dict[bool, list[Tensor]]
    retained: Retained
    retained_by_aot_eager: Retained
    num_compilations: int


def use_block(rank: int, num_ranks: int) -> Block:
    three = programs(make_block(), slices=2)
    own = three[0]
    accumulated = compare(Loop(sgd, num_batches=2), three)
    fused: dict[bool, Outcome] = {}
    fused_weights: dict[bool, list[Tensor]] = {}
    for set_to_none in (True, False):
        fused[set_to_none] = compare(Loop(fused_adamw, set_to_none=set_to_none), three)
        fused_weights[set_to_none] = own.weights()
    plain = make_block()
    plain_step = torch.compile(plain, backend="aot_eager", fullgraph=True)
    return Block(
        accumulated,
        fused,
        fused_weights,
        retain(own),
        retain(Program.of(plain, plain_step, own.dtype)),
        len(compilation.records()),
    )


@pytest.fixture(scope="module")
def blocks() -> list[Block]:
    return run_ranks(use_block, 2, timeout_s=280)


def test_gradients_accumulate_over_batches(blocks: list[Block]) -> None:
    for block in blocks:
        outcome = block.accumulated
        assert len(outcome.losses) == 6
        assert outcome.losses[:2] == outcome.losses_as_written[:2]  # before any update
        check_rounding(outcome)
        check_counts(outcome)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_fused_adamw(blocks: list[Block], set_to_none: bool) -> None:
    for block in blocks:
        check_rounding(block.fused[set_to_none])
        check_counts(block.fused[set_to_none])


def test_gradients_set_to_zero_train_as_those_set_to_none(blocks: list[Block]) -> None:
    for block in blocks:
        assert block.fused[True].losses == block.fused[False].losses
        pairs = zip(block.fused_weights[True], block.fused_weights[False], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_retained_graph_is_the_error_of_aot_eager(blocks: list[Block]) -> None:
    for block in blocks:
        assert "donated_buffer=False" in block.retained.error
        assert block.retained.error == block.retained_by_aot_eager.error


def test_a_retained_graph_runs_backward_twice_without_donated_buffers(blocks: list[Block]) -> None:
    for block in blocks:
        expected = block.retained_by_aot_eager
        assert worst(block.retained.once, expected.once) < ROUNDING[torch.float32]
        assert worst(expected.twice, [2 * gradient for gradient in expected.once]) == 0
        assert worst(block.retained.twice, [2 * gradient for gradient in block.retained.once]) == 0


def test_no_use_compiles_again(blocks: list[Block]) -> None:
    assert [block.num_compilations for block in blocks] == [1, 1]


# ---- bf16, gradient scaling, checkpoints, unequal batches ---------------------------------------


def train_in_bf16(rank: int, num_ranks: int, slices: int) -> tuple[Outcome, Outcome]:
    """With even cuts, and with uneven ones."""
    three = programs(make_block(), slices, torch.bfloat16)
    even = compare(Loop(sgd, num_steps=2), three)
    return even, compare(Loop(sgd, num_steps=2, data=Data(rows=9)), three)


@pytest.mark.parametrize("slices", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_first_loss_in_bf16_is_bitwise_and_gradients_within_rounding(slices: int) -> None:
    for even, uneven in run_ranks(train_in_bf16, 2, slices, timeout_s=280):
        assert even.losses[0] == even.losses_as_written[0]
        for outcome in (even, uneven):
            check_rounding(outcome, torch.bfloat16)
            check_counts(outcome)


OVERFLOW = 1
"""The step whose loss is infinite."""


@dataclasses.dataclass(frozen=True)
class Scaled:
    """What GradScaler did in each step: the scale after it, and whether weights changed."""

    outcome: Outcome
    scales: list[list[float]]
    is_updated: list[list[bool]]


def train_scaled(rank: int, num_ranks: int) -> Scaled:
    data = Data(is_tokens=True)
    scales: list[list[float]] = []
    is_updated: list[list[bool]] = []

    def use(program: Program) -> Trained:
        is_exact = program.dtype is torch.float64
        optimizer = sgd(program.module.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        trained = Trained()
        scales.append([])
        is_updated.append([])
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=not is_exact):
                y_BSV = program.step(data.batch(step, program.dtype))
            loss = data.loss(step, y_BSV) * (float("inf") if step == OVERFLOW else 1)
            before = program.weights()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if step != OVERFLOW:
                trained.losses.append(loss.item())
                trained.gradients.append(program.gradients())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales[-1].append(scaler.get_scale())
            is_updated[-1].append(worst(program.weights(), before) > 0)
        return trained

    return Scaled(compare(use, programs(make_transformer(), slices=2)), scales, is_updated)


def test_grad_scaler_under_autocast() -> None:
    for scaled in run_ranks(train_scaled, 2, timeout_s=280):
        assert scaled.outcome.losses[0] == scaled.outcome.losses_as_written[0]
        check_rounding(scaled.outcome, torch.bfloat16)
        check_counts(scaled.outcome)
        assert scaled.is_updated == [[True, False, True, True]] * 3
        assert scaled.scales == [[1024.0, 512.0, 512.0, 1024.0]] * 3


@dataclasses.dataclass(frozen=True)
class Repeated:
    outcome: Outcome
    remarks: list[str]


def train_checkpointed(rank: int, num_ranks: int) -> Repeated:
    outcome = compare(Loop(sgd, num_batches=2), programs(Checkpointed(), slices=2))
    (record,) = compilation.records()
    return Repeated(outcome, [str(remark) for remark in record.remarks])


def test_a_checkpointed_layer_with_accumulated_gradients() -> None:
    for repeated in run_ranks(train_checkpointed, 2, timeout_s=280):
        outcome = repeated.outcome
        assert outcome.losses[:2] == outcome.losses_as_written[:2]
        check_rounding(outcome)
        # As written, the layer counts its picks a second time when it runs again.
        own, written, exact = outcome.counts
        assert [2 * count for count in own] == written == exact
        assert any("runs again in the backward" in remark for remark in repeated.remarks)
        assert not any("refused" in remark for remark in repeated.remarks)


UNEQUAL_ROWS = (2, 4, 3, 1)


@dataclasses.dataclass(frozen=True)
class Unequal:
    outcome: Outcome
    starts: list[tuple[str, ...]]


def train_unequal(rank: int, num_ranks: int, slices: int) -> Unequal:
    rows = UNEQUAL_ROWS[rank]
    data = Data(rows=rows, share=rows / sum(UNEQUAL_ROWS))
    outcome = compare(Loop(sgd, num_steps=2, data=data), programs(make_block(), slices))
    graphs = [graph for record in compilation.records() for graph in record.graphs]
    starts = [graph.scheduled.start_order for graph in graphs if graph.scheduled is not None]
    return Unequal(outcome, [tuple(order) for order in starts])


@pytest.mark.parametrize("slices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_four_ranks_with_unequal_batches(slices: int) -> None:
    """Losses are weighted by rows: those of all ranks add up to the mean over all rows. Slices may
    have no row at all."""
    ranks: list[Unequal] = run_ranks(train_unequal, 4, slices, timeout_s=280)
    outcomes = [one.outcome for one in ranks]
    for outcome in outcomes:
        check_rounding(outcome)
        check_counts(outcome)
    own = [sum(losses) for losses in zip(*[o.losses for o in outcomes], strict=True)]
    written = [sum(losses) for losses in zip(*[o.losses_as_written for o in outcomes], strict=True)]
    assert own == pytest.approx(written, rel=LOSS_TOLERANCE[torch.float32])
    assert ranks[0].starts and all(one.starts == ranks[0].starts for one in ranks)
