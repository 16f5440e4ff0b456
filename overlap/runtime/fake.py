"""A job of any size in one process: torch's fake process group, which moves no bytes.

It lives in torch.testing, hence here alone; tests/runtime/test_fake.py fails if it moves.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap.errors import ConfigError


@contextmanager
def world(num_ranks: int, rank: int = 0) -> Generator[None]:
    """Be one rank of a job of that size, for as long as the `with` lasts.

    Raises ConfigError if this process is part of a job already.
    """
    if dist.is_initialized():
        raise ConfigError("this process has a process group already; a fake world needs its own")
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
