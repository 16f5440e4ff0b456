"""numerics='exact' through the backend, on gloo ranks: losses, every gradient and the weights after
several steps have the bits of the program as written."""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from models import DeepSeekV3, DeepSeekV3Config
from overlap import backend, certificate, compilation, explain, probe
from tests.dist import run_ranks

pytestmark = pytest.mark.dist
SLOW = pytest.mark.slow

TOY = dataclasses.replace(DeepSeekV3Config.toy(), max_seq=40, num_layers=1, num_dense=0)


@dataclasses.dataclass(frozen=True)
class Job:
    """One comparison.

    batches: per step, (rows, tokens) of rank 0; of more rows than one, rank 1 has one more.
    favoured: experts that get every token; the others get none.
    """

    batches: tuple[tuple[int, int], ...] = ((4, 16), (3, 13), (2, 17))
    slices: int = 2
    axis: str = "expert"
    favoured: tuple[int, ...] = ()
    compute: str = "loop"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """differing: what has other bits, by step and name.

    num_compared: how many tensors were compared. slices: of every compilation, those that ran.
    """

    differing: list[str]
    num_compared: int
    slices: list[set[int | None]]
    remarks: list[str]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, the sign of a zero aside."""
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.element_size()]
    return bool((one.view(kind) == other.view(kind)).logical_or((one == 0) & (other == 0)).all())


def make_model(job: Job) -> DeepSeekV3:
    moe = dataclasses.replace(TOY.moe, num_experts=8, expert_compute=job.compute)
    model = DeepSeekV3(dataclasses.replace(TOY, moe=moe), dist.group.WORLD)
    for layer in model.moe_layers():
        for expert in job.favoured:
            layer.router.bias_E[expert] = 9.0
    return model


def train(
    step: Callable[..., Tensor], model: nn.Module, make_batch: Any, num_steps: int
) -> dict[str, Tensor]:
    """Losses, gradients of every step and final weights, by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: dict[str, Tensor] = {}
    for i in range(num_steps):
        y = step(make_batch(i))
        generator = torch.Generator().manual_seed(i)
        weight = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        loss = (y.double() * weight).sum()
        loss.backward()
        found[f"loss {i}"] = loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{name} {i}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: p.detach().clone() for name, p in model.named_parameters()}


def compare_programs(
    model: nn.Module, make_batch: Any, num_steps: int, options: dict[str, Any]
) -> Outcome:
    torch._dynamo.reset()
    backend.set_dynamo_flags()
    num_known = len(compilation.records())
    own = copy.deepcopy(model)
    step = torch.compile(own, backend="overlap", fullgraph=True, options=options)
    written = torch.compile(model, backend=backend.as_written, fullgraph=True, dynamic=True)
    found = train(step, own, make_batch, num_steps)
    expected = train(written, model, make_batch, num_steps)
    assert found.keys() == expected.keys()
    records = compilation.records()[num_known:]
    return Outcome(
        [name for name, value in expected.items() if not same_bits(found[name], value)],
        len(expected),
        [{one.slice for g in record.graphs for one in g.collectives} for record in records],
        [str(remark) for record in records for remark in record.remarks],
    )


def train_model(rank: int, num_ranks: int, job: Job) -> Outcome:
    def make_batch(i: int) -> Tensor:
        rows, length = job.batches[i]
        generator = torch.Generator().manual_seed(100 * i + rank)
        return torch.randint(0, 256, (rows + rank * (rows > 1), length), generator=generator)

    options = {"slices": job.slices, "axis": job.axis, "numerics": "exact"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[certificate.FOLDER_VARIABLE] = folder
        if job.compute == "grouped":  # its activation runs over the rows of several experts
            certify(
                {"bfloat16": probe.functions(torch.bfloat16, {"silu": probe.FUNCTIONS["silu"]})}
            )
        return compare_programs(make_model(job), make_batch, len(job.batches), options)


def certify(
    functions: dict[str, Any],
    products: dict[str, Any] | None = None,
    rows: dict[str, Any] | None = None,
    max_rows: int = 96,
) -> None:
    """Keep a certificate of these kernels, by dtype, for this process."""
    place = certificate.environment(torch.device("cpu"))
    made = certificate.Certificate(place, max_rows, products or {}, functions, rows or {})
    certificate.save(made)


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        pytest.param(Job(axis="auto", slices=4, batches=((1, 9), (1, 5))), marks=SLOW),
        pytest.param(Job(favoured=(0, 5), batches=((2, 7), (2, 33))), marks=SLOW),
        pytest.param(Job(favoured=(0, 1), batches=((2, 7), (2, 33))), marks=SLOW),
        pytest.param(Job(compute="grouped", batches=((3, 11), (2, 5))), marks=SLOW),
    ],
    ids=["a sequence of steps", "one row", "two idle experts", "an idle rank", "bf16 products"],
)
def test_deepseek_along_experts(job: Job) -> None:
    # Other tests hold these graphs to the slow rules.
    env = {"OVERLAP_VERIFY": ""}
    for outcome in run_ranks(train_model, 2, job, timeout_s=280, env=env):
        assert not outcome.differing
        assert outcome.num_compared > 20 * len(job.batches)
        assert all({0, 1} <= slices for slices in outcome.slices), outcome.remarks


# ---- along the batch, with a certificate ---------------------------------------------------------


class Exchanged(nn.Module):
    """Dense layers around an exchange of blocks of another dim than the batch."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ranks = ranks
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x_BSD: Tensor) -> Tensor:
        h_BSF = torch.nn.functional.silu(self.up(self.norm(x_BSD)))
        blocks_FBS = h_BSF.permute(2, 0, 1).contiguous()
        sizes = [32 // self.ranks] * self.ranks
        group = dist.group.WORLD.group_name
        sent_FBS = funcol.all_to_all_single_autograd(blocks_FBS, sizes, sizes, group)
        return x_BSD + self.down(sent_FBS.permute(1, 2, 0).contiguous())


def train_exchanged(rank: int, num_ranks: int, has_certificate: bool) -> tuple[Outcome, Any]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ[certificate.FOLDER_VARIABLE] = folder
        if has_certificate:
            extent = probe.Extent(max_size=32, max_rows=96)
            dtype = torch.float32
            silu = {"silu": probe.FUNCTIONS["silu"]}
            rows = {"rms_norm": tuple(probe.classes_of_rows(probe.rms_norm, dtype, extent))}
            certify(
                {"float32": probe.functions(dtype, silu)},
                {"float32": dict(probe.products(dtype, extent))},
                {"float32": rows},
                extent.max_rows,
            )

        def make_batch(i: int) -> Tensor:
            generator = torch.Generator().manual_seed(10 * i + rank)
            return torch.randn(13 - i, 3, 16, generator=generator)

        options = {"slices": 2, "axis": "batch", "numerics": "exact"}
        outcome = compare_programs(Exchanged(num_ranks), make_batch, 2, options)
        return outcome, explain(compilation.records()[-1]).to_json()["certificate"]


@pytest.mark.parametrize("has_certificate", [pytest.param(True, marks=SLOW), False])
def test_a_gradient_that_lies_otherwise_in_memory_leaves_the_program_whole(
    has_certificate: bool,
) -> None:
    """The exchange permutes, and so does its gradient; joined from slices it would lie in order, and
    the kernels behind it round by that."""
    [(outcome, text)] = run_ranks(train_exchanged, 1, has_certificate, timeout_s=280)
    assert not outcome.differing and outcome.num_compared == 17
    assert outcome.slices == [{None}]
    assert any("refused: nothing is sliced" in remark for remark in outcome.remarks)
    if has_certificate:
        assert "classes of products" in text and "exact-" in text
    else:
        assert text.startswith("no certificate") and "overlap hardware --probe" in text
