"""Two gloo ranks that share the experts compute what one process computes on both batches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models import DeepSeekV3, DeepSeekV3Config, LossModel, MoEBlock, MoEConfig, text

pytestmark = pytest.mark.dist

DIM, NUM_RANKS = 16, 2
MODEL = DeepSeekV3Config.toy()


@dataclass(frozen=True)
class Case:
    """A MoE block; `favoured` experts get every token, or the router decides."""

    config: MoEConfig
    favoured: tuple[int, ...] = ()
    rows_of_rank: tuple[int, int] = (6, 6)


ROUTED = MoEConfig(hidden_dim=8, num_experts=4, top_k=2, num_shared=1)
CASES = {
    "sigmoid": Case(ROUTED),
    "softmax": Case(replace(ROUTED, scoring="softmax", top_k=1)),
    "groups": Case(replace(ROUTED, num_experts=8, num_groups=4, top_groups=2)),
    "starved expert": Case(ROUTED, favoured=(0, 2)),
    "starved rank": Case(ROUTED, favoured=(0, 1)),
    "unequal batches": Case(ROUTED, rows_of_rank=(9, 2)),
    "a rank without tokens": Case(ROUTED, rows_of_rank=(7, 0)),
}


def rows_and_weights(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Input rows, and a weight for each element of the output that tells rows apart."""
    generator = torch.Generator().manual_seed(rank)
    x, weight = torch.randn(2, case.rows_of_rank[rank], DIM, generator=generator)
    return x, weight


def make_block(case: Case, group: dist.ProcessGroup | None) -> MoEBlock:
    block = MoEBlock(DIM, case.config, group)
    for expert in case.favoured:
        block.moe.router.bias_E[expert] = 9.0
    with torch.no_grad():
        block.moe.router.weight_ED.mul_(50)  # far from ties
    return block


def run_block(case: Case, rank: int, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    block = make_block(case, group)
    x, weight = rows_and_weights(case, rank)
    x.requires_grad_()
    y = block(x)
    (y * weight).sum().backward()
    gradients = {f"grad {name}": p.grad for name, p in block.named_parameters()}
    return {"y": y.detach(), "grad x": x.grad, "count": block.moe.tokens_per_expert} | gradients


def run_model(rank: int, group: dist.ProcessGroup, backend: str | None) -> dict[str, Tensor]:
    """One step of the whole model; `backend` None runs it as written."""
    model = LossModel(DeepSeekV3(MODEL, group))
    torch._dynamo.reset()
    step = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    loss = step(*next(text.batches("train", 2, 8, rank=rank, world=NUM_RANKS)))
    loss.backward()
    model.model.update_expert_bias(group)
    gradients = {f"grad {name}": p.grad for name, p in model.model.named_parameters()}
    bias = model.model.moe_layers()[0].router.bias_E
    return {"loss": loss.detach(), "bias": bias} | gradients


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    group = dist.group.WORLD
    results = {name: run_block(case, rank, group) for name, case in CASES.items()}
    for backend in (None, "eager", "aot_eager"):
        results[f"model {backend}"] = run_model(rank, group, backend)
    torch.save(results, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, dict]]]:
    """The results of each rank, by case."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=rank_main, args=(rank, str(folder))) for rank in range(NUM_RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)  # seconds
        process.kill()
    assert [process.exitcode for process in processes] == [0] * NUM_RANKS
    yield [torch.load(folder / str(rank)) for rank in range(NUM_RANKS)]


def is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("name", CASES)
def test_block_equals_one_process(ranks, name):
    case = CASES[name]
    block = make_block(case, None)
    inputs = [rows_and_weights(case, rank) for rank in range(NUM_RANKS)]
    x = torch.cat([x for x, _ in inputs]).requires_grad_()
    y = block(x)
    (y * torch.cat([weight for _, weight in inputs])).sum().backward()

    results = [rank[name] for rank in ranks]
    torch.testing.assert_close(torch.cat([r["y"] for r in results]), y.detach())
    torch.testing.assert_close(torch.cat([r["grad x"] for r in results]), x.grad)
    assert torch.equal(sum(r["count"] for r in results), block.moe.tokens_per_expert)
    for key, parameter in block.named_parameters():
        shares = [r[f"grad {key}"] for r in results]
        whole = torch.cat(shares) if is_expert(key) else sum(shares)
        torch.testing.assert_close(whole, parameter.grad, msg=lambda m, k=key: f"{k}: {m}")


def test_starved_rank_was_starved(ranks):
    for rank in ranks:
        assert rank["starved rank"]["count"].tolist() == [6, 6, 0, 0]
    assert ranks[1]["starved rank"]["grad moe.experts.w1_LFD"].abs().sum() == 0


def test_model_equals_one_process(ranks):
    model = LossModel(DeepSeekV3(MODEL))
    loss = model(*next(text.batches("train", 2 * NUM_RANKS, 8)))
    loss.backward()
    model.model.update_expert_bias()

    results = [rank["model None"] for rank in ranks]
    torch.testing.assert_close(sum(r["loss"] for r in results) / NUM_RANKS, loss.detach())
    for key, parameter in model.model.named_parameters():
        shares = [r[f"grad {key}"] / NUM_RANKS for r in results]
        whole = torch.cat(shares) if is_expert(key) else sum(shares)
        torch.testing.assert_close(whole, parameter.grad, msg=lambda m, k=key: f"{k}: {m}")
    for result in results:
        assert torch.equal(result["bias"], model.model.moe_layers()[0].router.bias_E)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model_equals_the_model_as_written(ranks, backend):
    for rank in ranks:
        expected = rank["model None"]
        for key, value in rank[f"model {backend}"].items():
            torch.testing.assert_close(value, expected[key], msg=lambda m, k=key: f"{k}: {m}")
