"""Graphs with known optimal schedules, traced under the fake process group.

Unit costs: every collective and every matrix product 1, the rest 0 (`overlap.cost.unit_us`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH = 8
ROWS = 16


@contextmanager
def fake_world(size: int = 8) -> Generator[None]:
    """A process group of `size` ranks in one process, which moves no data."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace(fn: Callable[..., object], *args: object) -> fx.GraphModule:
    """`fn` as an ATen graph with fake values."""
    return make_fx(fn, tracing_mode="fake")(*args)


def _x(rows: int = ROWS) -> torch.Tensor:
    return torch.zeros(rows, WIDTH)


def _w() -> torch.Tensor:
    return torch.zeros(WIDTH, WIDTH)


def all_to_all(x: torch.Tensor, group: object = None) -> torch.Tensor:
    return funcol.all_to_all_single(x, None, None, group or dist.group.WORLD)


def all_gather(x: torch.Tensor, group: object = None) -> torch.Tensor:
    return funcol.all_gather_single(x, 0, group or dist.group.WORLD)


def sliced_moe(num_slices: int, num_layers: int) -> fx.GraphModule:
    """k slices x L layers, one slice traced after the other."""

    def layer(x: torch.Tensor, wq: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor):
        h = x @ wq
        e = torch.relu(all_to_all(h) @ w1) @ w2
        return all_to_all(e) + h

    def fn(xs: list[torch.Tensor], weights: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for x in xs:
            for wq, w1, w2 in weights:
                x = layer(x, wq, w1, w2)
            results.append(x)
        return results

    xs = [_x() for _ in range(num_slices)]
    return trace(fn, xs, [[_w(), _w(), _w()] for _ in range(num_layers)])


def shared_expert(is_last: bool = False) -> fx.GraphModule:
    """An MoE layer with a shared expert, traced before or behind the routed ones."""

    def shared(x: torch.Tensor, s1: torch.Tensor, s2: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ s1) @ s2

    def fn(x, s1, s2, w1, w2):
        a = all_to_all(x)
        sh = None if is_last else shared(x, s1, s2)
        c = all_to_all(torch.relu(a @ w1) @ w2)
        return c + (shared(x, s1, s2) if sh is None else sh)

    return trace(fn, _x(), _w(), _w(), _w(), _w())


def ep_backward() -> fx.GraphModule:
    """The backward of an un-sliced MoE layer: weight gradients can fill the exchange."""

    def fn(dy, h, x1, w1, w2, wq):
        d = all_to_all(dy)
        dw2 = h.T @ d
        dh = d @ w2.T
        dw1 = x1.T @ dh
        dx = dh @ w1.T
        return dw1, dw2, all_to_all(dx) @ wq

    return trace(fn, _x(), _x(), _x(), _w(), _w(), _w())


def fsdp_forward(num_layers: int = 6) -> fx.GraphModule:
    """Layers of two all-gathered weights and two matrix products each."""

    def fn(x: torch.Tensor, shards: list[list[torch.Tensor]]) -> torch.Tensor:
        for s1, s2 in shards:
            x = torch.relu(x @ all_gather(s1))
            x = x @ all_gather(s2)
        return x

    shards = [[torch.zeros(1, WIDTH) for _ in range(2)] for _ in range(num_layers)]
    return trace(fn, _x(), shards)


def fsdp_step(num_layers: int = 4) -> fx.GraphModule:
    """Forward and backward of layers of one gathered weight; each gradient is reduce-scattered."""

    def fn(x: torch.Tensor, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for shard in shards:
            weight = all_gather(shard)
            saved.append((x, weight))
            x = x @ weight
        gradients: list[torch.Tensor] = []
        for before, weight in reversed(saved):
            gradients.append(funcol.reduce_scatter_single(before.T @ x, "sum", 0, dist.group.WORLD))
            x = x @ weight.T
        return gradients

    return trace(fn, _x(), [torch.zeros(1, WIDTH) for _ in range(num_layers)])


def fsdp_moe(num_layers: int, num_groups: int, num_slices: int = 2) -> fx.GraphModule:
    """Sliced MoE layers whose weights are all-gathered: exchanges and gathers on one group or on
    two. Call within `fake_world`."""
    second = dist.new_group() if num_groups == 2 else dist.group.WORLD

    def fn(xs: list[torch.Tensor], shards: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        for s1, s2 in shards:
            w1, w2 = all_gather(s1, second), all_gather(s2, second)
            xs = [all_to_all(torch.relu(all_to_all(x) @ w1) @ w2) for x in xs]
        return xs

    shards = [[torch.zeros(1, WIDTH) for _ in range(2)] for _ in range(num_layers)]
    return trace(fn, [_x() for _ in range(num_slices)], shards)


def gathers(num_gathers: int = 12, num_tail: int = 8) -> fx.GraphModule:
    """Gathered weights, each for one matrix product of its own, and independent compute."""

    def fn(x: torch.Tensor, shards: list[torch.Tensor], tail: list[torch.Tensor]):
        products = [x @ all_gather(shard) for shard in shards]
        return products, [x @ w for w in tail]

    shards = [torch.zeros(WIDTH // 8, WIDTH) for _ in range(num_gathers)]
    return trace(fn, _x(), shards, [_w() for _ in range(num_tail)])


def host_reads(num_slices: int) -> fx.GraphModule:
    """Slices whose rows go where counts say that the host has to read: an exchange of counts, two
    reads, the exchange of rows, an expert, and back. Traced one slice after the other."""

    def one(x: torch.Tensor, counts: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor):
        sent = counts.sum().item()
        received = all_to_all(counts).sum().item()
        torch._check(sent == x.shape[0])
        rows = funcol.all_to_all_single(x, [received], [sent], dist.group.WORLD)
        return funcol.all_to_all_single((rows @ w1) @ w2, [sent], [received], dist.group.WORLD)

    def fn(xs: list[torch.Tensor], counts: list[torch.Tensor], w1: torch.Tensor, w2: torch.Tensor):
        return [one(x, c, w1, w2) for x, c in zip(xs, counts, strict=True)]

    xs = [_x() for _ in range(num_slices)]
    counts = [torch.ones(8, dtype=torch.int64) for _ in range(num_slices)]
    return make_fx(fn, tracing_mode="symbolic")(xs, counts, _w(), _w())
