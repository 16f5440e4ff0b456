"""The fake world: torch's test-only process group is where it was, and goes away again."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from overlap.errors import ConfigError
from overlap.runtime import fake


def test_one_process_is_a_rank_of_many():
    with fake.world(64, rank=5):
        assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (64, 5, "fake")
    assert not dist.is_initialized()


def test_a_process_is_in_one_world():
    with fake.world(2), pytest.raises(ConfigError, match="process group already"), fake.world(2):
        pass
