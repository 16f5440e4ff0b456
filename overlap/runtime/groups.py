"""Group names to process groups: what a compiled graph's group strings mean on this rank.

A graph names its groups; only here, on a rank, does a name become a process group. Works for every
backend, torch's fake process group included.
"""

from __future__ import annotations

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
