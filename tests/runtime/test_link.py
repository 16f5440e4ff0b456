"""The emulated link: gloo's results, a link's times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

from overlap.errors import ConfigError, RankError
from overlap.runtime import groups
from overlap.runtime.link import Link, LinkConfig, Record, Recording, Transfer, process_link
from overlap.runtime.link_group import EMULATED, StartBoard, register
from tests.dist import run_ranks

c10d = torch.ops._c10d_functional

ROUNDING_S = 2e-6  # the ranks tell each other microseconds

pytestmark = pytest.mark.dist


def operand(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(rows * 3).reshape(rows, 3) * 7 + 100 * rank).remainder(31).to(dtype)


def every_collective(rank: int, world: int, dtype: torch.dtype) -> dict[str, Any]:
    """Results by name, of the functional collectives and of torch.distributed's own."""
    x, name, wait = operand(rank, 4, dtype), groups.default_group_name(), c10d.wait_tensor
    empty = x.new_empty
    results: dict[str, Any] = {
        "all_reduce": wait(c10d.all_reduce(x, "sum", name)),
        "all_gather": wait(c10d.all_gather_into_tensor(x, world, name)),
        "reduce_scatter": wait(c10d.reduce_scatter_tensor(x, "sum", world, name)),
        "broadcast": wait(c10d.broadcast(x, 1, name)),
        "all_to_all": wait(c10d.all_to_all_single(x, [2] * world, [2] * world, name)),
        "coalesced": [
            wait(t) for t in c10d.all_gather_into_tensor_coalesced([x, x + 1], world, name)
        ],
        "scatter_coalesced": [
            wait(t) for t in c10d.reduce_scatter_tensor_coalesced([x, x], "sum", world, name)
        ],
        "all_reduce_coalesced": [wait(t) for t in c10d.all_reduce_coalesced([x, x], "max", name)],
    }
    dist.all_to_all(sent := [empty(2, 3) for _ in range(world)], list(x.chunk(world)))
    dist.all_gather(listed := [empty(4, 3) for _ in range(world)], x)
    dist.all_gather_single(gathered := empty(4 * world, 3), x)
    dist.reduce_scatter_single(scattered := empty(2, 3), x)
    dist.reduce_scatter(from_list := empty(2, 3), list(x.chunk(world)))
    dist.all_to_all_single(exchanged := empty(4, 3), x)
    dist.reduce(reduced := x.clone(), 0)
    dist.gather(x, collected := [empty(4, 3) for _ in range(world)] if rank == 0 else None)
    dist.scatter(dealt := empty(2, 3), list(x.chunk(world)) if rank == 0 else None)
    dist.all_gather_object(objects := [None] * world, {"rank": rank})
    dist.broadcast_object_list(told := [{"from": rank}], 1)
    dist.barrier()
    peer, received = 1 - rank, empty(4, 3)
    messages = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    results["own"] = [sent, listed, gathered, scattered, from_list, exchanged, collected, dealt]
    results["reduced"] = reduced if rank == 0 else None
    results["objects"] = [objects, told, received]
    return results


def uneven(rank: int, world: int, dtype: torch.dtype, splits: list[list[int]]) -> Tensor:
    sent, received = splits[rank], [row[rank] for row in splits]
    x = operand(rank, sum(sent), dtype)
    name = groups.default_group_name()
    return c10d.wait_tensor(c10d.all_to_all_single(x, received, sent, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives_give_what_gloo_gives(dtype: torch.dtype):
    ours = run_ranks(every_collective, 2, dtype, backend=EMULATED)
    gloos = run_ranks(every_collective, 2, dtype)
    torch.testing.assert_close(ours, gloos, rtol=0, atol=0)


@pytest.mark.parametrize(
    "splits",
    [[[1, 4], [0, 3]], [[0, 5], [0, 0]], [[0, 0], [0, 0]]],
    ids=["uneven", "one_way", "nothing"],
)
def test_uneven_splits_give_what_gloo_gives(splits: list[list[int]]):
    ours = run_ranks(uneven, 2, torch.bfloat16, splits, backend=EMULATED)
    torch.testing.assert_close(ours, run_ranks(uneven, 2, torch.bfloat16, splits), rtol=0, atol=0)


def traced_and_differentiated(rank: int, world: int) -> list[Tensor]:
    name = groups.default_group_name()

    def exchange(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_to_all_single(x * 2, [2, 2], [2, 2], name)) + 1

    x = operand(rank, 4, torch.float32).requires_grad_()
    exchanged = funcol.all_to_all_single_autograd(x, [2, 2], [2, 2], name)
    (exchanged * (rank + 1)).sum().backward()
    assert x.grad is not None
    return [make_fx(exchange)(x.detach())(x.detach()), exchange(x.detach()), x.grad]


def test_graphs_and_autograd_go_over_the_link():
    for rank, (traced, eager, grad) in enumerate(
        run_ranks(traced_and_differentiated, 2, backend=EMULATED)
    ):
        assert torch.equal(traced, eager), rank
        assert torch.equal(grad, torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].expand(4, 3))


def in_two_groups(rank: int, world: int) -> tuple[float, float, list[Record]]:
    register(LinkConfig(bandwidth_mbit=80))
    other = dist.new_group([0, 1])
    x = torch.zeros(50_000)  # 0.1 MB leave the rank: 10 ms at 10 MB/s
    with process_link().record() as seen:
        start_s = time.monotonic()
        works = [
            dist.all_to_all_single(torch.empty_like(x), x, group=group, async_op=True)
            for group in (None, other, None, other)
        ]
        for work in works:
            work.wait()
        took_s = time.monotonic() - start_s
    assert all(work.is_completed() for work in works)
    return took_s, seen.comm_s, seen.records


def test_groups_share_the_bandwidth_and_each_is_a_fifo():
    for took_s, comm_s, records in run_ranks(in_two_groups, 2, backend=EMULATED):
        assert took_s >= 4 * 0.01
        assert comm_s >= 4 * 0.01 - ROUNDING_S
        first, second, third, fourth = records
        assert [r.num_bytes for r in records] == [100_000.0] * 4
        assert third.start_s >= first.end_s
        assert fourth.start_s >= second.end_s
        for r in records:
            assert r.wait_exit_s >= r.end_s >= r.start_s >= r.issue_s - ROUNDING_S


def test_lanes_that_are_on_the_link_together_share_it():
    link = Link(LinkConfig(bandwidth_mbit=80))
    start_s = time.monotonic() + 0.02
    both, only_send = ("send", "receive"), ("send",)
    plan = [("ep", 1e5, both), ("dp", 2e5, both), ("p2p", 1e5, only_send)]
    transfers = [
        Transfer(Record(lane, lane, size, start_s), lambda: start_s, size, directions=directions)
        for lane, size, directions in plan
    ]
    for transfer in transfers:
        link.submit(transfer.record.kind, transfer)
    assert link.wait(transfers[1]) and all(map(link.is_off, transfers))
    # 10 MB/s: a third each for 30 ms, then dp alone with 0.1 MB left
    took_ms = [1e3 * (t.record.end_s - t.record.start_s) for t in transfers]
    assert took_ms == pytest.approx([30, 40, 30])
    assert time.monotonic() >= start_s + 0.04


def test_a_transfer_that_a_rank_does_not_start_is_waited_for_until_the_deadline():
    link = Link(LinkConfig())
    never = Transfer(Record("broadcast", "0", 8.0, 0.0), lambda: None, 8.0)
    link.submit("0", never)
    assert not link.wait(never, until_s=time.monotonic() + 0.01)


def test_a_wait_looks_at_its_own_transfer_while_another_is_on_the_link():
    link = Link(LinkConfig(bandwidth_mbit=8))
    now_s = time.monotonic()
    link.submit("dp", Transfer(Record("all_reduce", "dp", 1e6, now_s), lambda: now_s, 1e6))
    joined_s = now_s + 0.05
    late = Transfer(
        Record("broadcast", "0", 8.0, now_s),
        lambda: joined_s if time.monotonic() > joined_s else None,
        8.0,
        directions=("send",),
    )
    link.submit("0", late)
    assert link.wait(late)
    assert time.monotonic() < now_s + 0.5  # the other one takes a second


def test_a_wait_ends_at_its_deadline():
    link = Link(LinkConfig(bandwidth_mbit=8))
    now_s = time.monotonic()
    slow = Transfer(Record("all_reduce", "0", 1e6, now_s), lambda: now_s, 1e6)
    link.submit("0", slow)
    assert not link.wait(slow, until_s=now_s + 0.02)
    assert time.monotonic() < now_s + 0.5


def test_a_transfer_that_failed_holds_up_nobody():
    link = Link(LinkConfig())
    failed = Transfer(Record("all_reduce", "0", 8.0, 0.0), lambda: None, 8.0)
    after = Transfer(Record("all_reduce", "0", 8.0, 0.0), time.monotonic, 8.0)
    link.submit("0", failed)
    link.submit("0", after)
    link.drop(failed)
    assert link.wait(after)


def test_ranks_see_each_others_starts():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        boards = list(threads.map(lambda rank: StartBoard(store, rank, 2), (0, 1)))
    first, second = boards
    now_s = time.monotonic()
    for number in range(2 * StartBoard.SLOTS + 3):
        assert first.post(now_s + number) == number
        assert second.started(number) is None
        second.post(now_s + 1.0 + number)
        assert first.started(number) == second.started(number)
        assert first.started(number) == pytest.approx(now_s + 1.0 + number, abs=ROUNDING_S)
    for _ in range(StartBoard.SLOTS + 1):  # the second rank is a whole ring behind
        first.post(now_s + 1e6)
    number = 2 * StartBoard.SLOTS + 3
    assert second.started(number) is None
    second.post(now_s + 2.0)
    assert second.started(number) == pytest.approx(now_s + 2.0, abs=ROUNDING_S)
    assert not Path(store.get(StartBoard.KEYS[0]).decode()).exists()


def test_ranks_of_two_machines_are_told(tmp_path: Path):
    store = dist.HashStore()
    store.set(StartBoard.KEYS[0], str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match=r"rank 1 does not see .*elsewhere of rank 0"):
        StartBoard(store, 1, 2)


def volumes(rank: int, world: int) -> dict[str, float]:
    x, rows = torch.zeros(8, 4), [[1, 7], [3, 5]]  # 128 bytes
    name, wait = groups.default_group_name(), c10d.wait_tensor
    starts: list[Callable[[], Tensor]] = [
        lambda: c10d.all_gather_into_tensor(x, world, name),
        lambda: c10d.reduce_scatter_tensor(x, "sum", world, name),
        lambda: c10d.all_reduce(x, "sum", name),
        lambda: c10d.broadcast(x, 0, name),
        lambda: c10d.all_to_all_single(x, [r[rank] for r in rows], rows[rank], name),
    ]
    with process_link().record() as seen:
        for start in starts:
            wait(start())
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
    return {record.kind: record.num_bytes for record in seen.records}


def test_bytes_on_the_link():
    expected = {
        "all_gather": 128,
        "reduce_scatter": 64,
        "all_reduce": 128,
        "broadcast": 128,
        "all_to_all": 7 * 16,  # rank 0 sends 7 rows and receives 3, rank 1 the other way round
        "barrier": 0,
    }
    first, second = run_ranks(volumes, 2, backend=EMULATED)
    assert first == {**expected, "send": 128}
    assert second == {**expected, "receive": 128}


def start_and_tell(rank: int, world: int) -> list[bool]:
    """Rank 1 starts after rank 0 has: rank 0's start has to return before."""
    store = dist.distributed_c10d._get_default_store()
    x, kinds = torch.ones(4), ["all_reduce", "all_to_all", "reduce_scatter", "send"]
    is_done: list[bool] = []
    for kind in kinds:
        if rank == 1:
            store.wait([kind])
        match kind:
            case "all_reduce":
                work = dist.all_reduce(x, async_op=True)
            case "all_to_all":
                work = dist.all_to_all_single(torch.empty(4), x, async_op=True)
            case "reduce_scatter":
                work = dist.reduce_scatter_single(torch.empty(2), x, async_op=True)
            case _:
                work = dist.irecv(x, 1) if rank == 0 else dist.isend(x, 0)
        assert work is not None
        if rank == 0:
            is_done.append(work.is_completed())
            store.set(kind, "started")
        work.wait()
        is_done.append(work.is_completed())
    return is_done


def test_starting_does_not_wait():
    first, second = run_ranks(start_and_tell, 2, backend=EMULATED)
    assert first == [False, True] * 4
    assert second == [True] * 4


def late_rank(rank: int, world: int) -> tuple[float, Record]:
    register(LinkConfig(bandwidth_mbit=80, latency_us=3000))
    x = torch.zeros(50_000)
    dist.barrier()
    time.sleep(0.05 * rank)
    with process_link().record() as seen:
        dist.all_to_all_single(torch.empty_like(x), x)
    return seen.records[0].issue_s, seen.records[0]


def test_a_transfer_starts_when_the_last_rank_is_there():
    (_, first), (last_issue_s, last) = run_ranks(late_rank, 2, backend=EMULATED)
    for record in (first, last):
        assert record.start_s >= last_issue_s - ROUNDING_S
        assert record.end_s - record.start_s >= 0.01 + 0.003 - ROUNDING_S
    assert first.wait_exit_s - first.wait_enter_s >= 0.013


def test_a_dead_rank_fails_its_peers():
    with pytest.raises(RankError, match="rank 1 died without a word: exit code 3"):
        run_ranks(peer_leaves, 2, backend=EMULATED, timeout_s=60)
    assert run_ranks(peer_leaves_quietly, 2, backend=EMULATED, timeout_s=60)[0] == "RuntimeError"


def peer_leaves(rank: int, world: int) -> None:
    dist.barrier()
    if rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def peer_leaves_quietly(rank: int, world: int) -> str:
    """Rank 1 closes its connections and stays alive; rank 0 waits for it."""
    dist.barrier()
    if rank == 1:
        dist.group.WORLD._gloo.abort()
        return "left"
    work = dist.all_reduce(torch.ones(1), async_op=True)
    try:
        work.wait(timedelta(seconds=1))
    except Exception as error:
        return type(error).__name__
    return "done"


def train_data_parallel(rank: int, world: int) -> Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    assert model.module.weight.grad is not None
    return model.module.weight.grad


def test_ddp_trains_over_the_link():
    for gradient in run_ranks(train_data_parallel, 2, backend=EMULATED):
        assert torch.equal(gradient, torch.full((3, 3), 3.0))


def poll(rank: int, world: int) -> list[bool]:
    """Rank 1 never joins; rank 0 polls until the work says that it is over."""
    group = dist.new_group([0, 1], backend=EMULATED, timeout=timedelta(seconds=1))
    if rank == 1:
        time.sleep(2)
        return []
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None
    until_s = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < until_s:
        time.sleep(0.05)
    return [work.is_completed(), work.is_success(), work.exception() is not None]


def test_a_failed_collective_is_over():
    assert run_ranks(poll, 2, backend=EMULATED)[0] == [True, False, True]


def recorded_ranks(rank: int, world: int) -> tuple[list[str], float]:
    register(LinkConfig(bandwidth_mbit=0.001))
    group = dist.new_group([0, 1], backend="recorded")
    with process_link().record() as seen:
        dist.all_reduce(torch.ones(1000), group=group)
    return [record.kind for record in seen.records], seen.comm_s


def test_recorded_is_gloo_without_the_emulated_bandwidth():
    for kinds, comm_s in run_ranks(recorded_ranks, 2, backend=EMULATED):
        assert kinds == ["all_reduce"]
        assert 0 < comm_s < 30  # 8 kB at 1 kbit/s would be 64 s


def test_recording_counts_overlapping_times_once():
    records = [
        Record("all_to_all", "0", 8.0, 0.0, 0.0, 4.0, 1.0, 4.0),
        Record("all_to_all", "1", 8.0, 0.0, 2.0, 5.0, 4.0, 5.0),
        Record("all_to_all", "1", 8.0, 6.0),
    ]
    seen = Recording(records)
    assert (seen.comm_s, seen.exposed_s, seen.num_bytes) == (5.0, 4.0, 24.0)
    assert seen.hidden == pytest.approx(0.2)


def test_config_is_checked(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="bandwidth_mbit of the emulated link is 0; expected > 0"):
        LinkConfig(bandwidth_mbit=0)
    monkeypatch.setenv("OVERLAP_LINK_MBIT", "fast")
    with pytest.raises(ConfigError, match="OVERLAP_LINK_MBIT is 'fast'; expected a number"):
        LinkConfig.from_env()
    monkeypatch.setenv("OVERLAP_LINK_MBIT", "100")
    assert LinkConfig.from_env() == LinkConfig(bandwidth_mbit=100)
