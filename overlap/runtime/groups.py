"""Group names to process groups: what a compiled graph's group strings mean on this rank.

A graph names its groups; only here, on a rank, does a name become a process group. Works for every
backend, torch's fake process group included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from overlap.errors import ConfigError, unknown_name


def group_names() -> list[str]:
    """The names of all groups that this rank is in, sorted."""
    return sorted(c10d._world.pg_names.values())


def default_group_name() -> str:
    """The name of the group of all ranks. Raises ConfigError where there is none."""
    if not dist.is_initialized():
        raise ConfigError("this process has no process group; call init_process_group first")
    return c10d._get_default_group().group_name


def resolve(name: str) -> dist.ProcessGroup:
    """The process group called `name`. Raises ConfigError, listing the names, where none is."""
    if name not in group_names():
        raise unknown_name("group", name, group_names())
    return c10d._resolve_process_group(c10d.GroupName(name))


def size_of(name: str) -> int:
    """How many ranks the group has."""
    return dist.get_world_size(resolve(name))


def ranks_of(name: str) -> tuple[int, ...]:
    """The global ranks of the group, in the order of its group ranks."""
    return tuple(dist.get_process_group_ranks(resolve(name)))


def along(sizes: Sequence[int], dim: int) -> dist.ProcessGroup:
    """This rank's group along `dim` of the ranks laid out row by row in a grid of `sizes`; where
    that is all ranks, the group there is already. All ranks have to call it.

    Raises ConfigError if the grid does not have as many places as there are ranks.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if math.prod(sizes) != num_ranks:
        raise ConfigError(f"a mesh of {math.prod(sizes)} ranks does not fit {num_ranks} ranks")
    if sizes[dim] == num_ranks:
        return c10d._get_default_group()
    grid = torch.arange(num_ranks).reshape(list(sizes)).movedim(dim, -1)
    group, _ = dist.new_subgroups_by_enumeration(grid.reshape(-1, sizes[dim]).tolist())
    assert isinstance(group, dist.ProcessGroup)
    return group
