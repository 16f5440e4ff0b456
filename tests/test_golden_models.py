"""The whole pipeline on a small model: a golden of what it makes, the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from models import MoEBlock, MoEConfig
from overlap import Config, report

BLOCK = MoEConfig(hidden_dim=8, num_experts=4, top_k=2)


@pytest.fixture
def fake_group() -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_moe_block(fake_group: None, overlap_golden: Callable[..., None]) -> None:
    block = MoEBlock(16, BLOCK, dist.group.WORLD)
    x_BSD = torch.zeros(4, 8, 16)
    overlap_golden(block, (x_BSD,), name="moe_block.slices2", config=Config(slices=2, axis="batch"))


def print_dump() -> None:
    """What a fresh process makes of the block; run by the test below."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    block = MoEBlock(16, BLOCK, dist.group.WORLD)
    config = Config(slices=2, hardware="h100")
    for graph in report.compile_graphs(block, (torch.zeros(4, 8, 16),), config):
        print(graph.kind)
        print(graph.dump)


def test_two_processes_make_one_dump() -> None:
    command = [sys.executable, "-c", f"from {__name__} import print_dump; print_dump()"]
    dumps = [
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert "backward" in dumps[0] and "all_to_all" in dumps[0]
    assert dumps[0] == dumps[1]
