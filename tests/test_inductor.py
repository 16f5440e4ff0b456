"""`inner="inductor"`: the same values as plain Inductor, in the order of the schedule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from models.moe import MoEBlock, MoEConfig
from overlap import collectives, compilation, explain
from overlap.compilation import Compilation
from overlap.inner.cut import cut
from overlap.inner.runs import kernels_of
from overlap.runtime import fake

KERNEL = re.compile(r"^\s+(cpp_fused_\w+)\(", re.MULTILINE)
"""A call of a generated kernel in the code that Inductor generates."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def make_block() -> nn.Module:
    torch.manual_seed(0)
    return MoEBlock(16, MoEConfig(hidden_dim=8, num_experts=4, top_k=2), dist.group.WORLD)


def weighted(y: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (y * torch.randn(y.shape, generator=generator)).sum() / y.shape[0]


# --- the order, read back from what runs ----------------------------------------------------------


def places(gm: fx.GraphModule) -> tuple[list[str], list[int]]:
    """Starts, waits and host reads of a graph in order; how many of them come before each run."""
    fixed: list[str] = []
    runs: list[int] = []
    for node in gm.graph.nodes:
        if kernels_of(node):
            runs.append(len(fixed))
        elif any(
            test(node)
            for test in (collectives.is_start, collectives.is_wait, collectives.is_host_read)
        ):
            fixed.append(node.name)
    return fixed, runs


def scheduled_places(gm: fx.GraphModule) -> tuple[list[str], list[int]]:
    """The same of the scheduled graph, for the runs that it is to be cut into."""
    fixed, _ = places(gm)
    first = {run.nodes[0] for run in cut(gm).runs}
    seen = 0
    runs: list[int] = []
    for node in gm.graph.nodes:
        seen += node.name in fixed
        runs += [seen] * (node in first)
    return fixed, sorted(runs)


@pytest.mark.timeout(600)
def test_the_order_survives_and_compute_is_fused() -> None:
    with fake.world(2):
        step = torch.compile(
            make_block(), backend="overlap", options={"slices": 2, "inner": "inductor"}
        )
        record = compile_only(step, torch.randn(6, 4, 16))
        assert [one.kind for one in record.compiled] == ["forward", "backward"]
        for graph, one in zip(record.graphs, record.compiled, strict=True):
            assert not one.failures
            assert places(one.gm) == scheduled_places(graph.gm)
            called = [kernels for node in one.gm.graph.nodes if (kernels := kernels_of(node))]
            assert tuple(called) == one.kernels
            num_fused = sum(len(KERNEL.findall(kernels.source)) for kernels in called)
            assert 0 < num_fused < one.num_nodes / 2
            assert one.num_eager < one.num_nodes
        assert check_calls_follow_the_code(record)
        text = str(explain(record))
        assert "kernels of the forward: Inductor's, " in text


def compile_only(step: Any, x: Tensor) -> Compilation:
    """Compile forward and backward. The fake group moves nothing, so that the values that say how
    many rows there are do not fit: running fails or not, after everything is compiled."""
    try:
        step(x)
    except Exception as error:
        print(error)
    return compilation.records()[-1]
