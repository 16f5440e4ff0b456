"""Process groups over the emulated link, and over a real one that is only recorded.

    register(LinkConfig(bandwidth_mbit=400))
    dist.init_process_group("emulated", ...)

The bytes move with gloo. The ranks tell each other in shared memory when they start a collective,
and a wait lasts until gloo has moved the bytes and the link, as all ranks play it, would have.
"""

# torch's stubs give other parameter names than c10d calls with:
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.errors import ConfigError
from overlap.runtime.link import FULL_DUPLEX, LinkConfig, Record, Transfer, process_link

EMULATED = "emulated"
RECORDED = "recorded"


def register(config: LinkConfig | None = None) -> None:
    """Make the backends `emulated` and `recorded` known to torch.distributed; may be called again.

    `config` sets this process's link, for groups made before and after; None leaves it as it is,
    at first as the environment says.
    """
    if config is not None:
        process_link().config = config
    if EMULATED in dist.Backend.backend_list:
        return
    for name, make in ((EMULATED, _emulated_group), (RECORDED, _recorded_group)):
        dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])


def _emulated_group(options: Any, _: Any) -> LinkGroup:
    return LinkGroup(EMULATED, options)


def _recorded_group(options: Any, _: Any) -> LinkGroup:
    return LinkGroup(RECORDED, options)


class StartBoard:
    """When each rank of a group started each of its collectives, in memory that the ranks share.

    A slot is one number that is written at once: the round of the ring that it belongs to, and
    microseconds of time.monotonic(), which all processes of a machine share, since the board was
    made.
    """

    SLOTS = 4096
    TIME_BITS = 44  # of microseconds: half a year
    KEYS = ("link/board", "link/since", "link/mapped")

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._num_posted = 0
        num_bytes = 8 * self.SLOTS * size
        if rank == 0:
            with tempfile.NamedTemporaryFile(prefix="overlap-link-", delete=False) as file:
                file.truncate(num_bytes)
            store.set(self.KEYS[1], str(int(time.monotonic()) - 1))
            store.set(self.KEYS[0], file.name)
        path = Path(store.get(self.KEYS[0]).decode())
        try:
            with path.open("r+b") as file:
                self._slots = memoryview(mmap.mmap(file.fileno(), num_bytes)).cast("q")
        except FileNotFoundError:
            raise ConfigError(
                f"the emulated link has all of its ranks on one machine; rank {rank} does not see "
                f"{path} of rank 0. Use backend 'gloo' or 'recorded' over a real network"
            ) from None
        self._since_s = int(store.get(self.KEYS[1]))
        if store.add(self.KEYS[2], 1) == size:
            path.unlink()

    def post(self, when_s: float) -> int:
        """This rank starts its next collective; returns the collective's number."""
        number = self._num_posted
        self._num_posted += 1
        lap = number // self.SLOTS + 1
        self._slots[self._slot(self.rank, number)] = lap << self.TIME_BITS | int(
            (when_s - self._since_s) * 1e6
        )
        return number

    def started(self, number: int) -> float | None:
        """When the last rank started collective `number`; None while one has not."""
        last_s = 0.0
        for rank in range(self.size):
            slot = self._slots[self._slot(rank, number)]
            lap, micros = slot >> self.TIME_BITS, slot & ((1 << self.TIME_BITS) - 1)
            if lap <= number // self.SLOTS:
                return None
            if lap == number // self.SLOTS + 1:  # else it was so long ago that it is overwritten
                last_s = max(last_s, self._since_s + micros * 1e-6)
        return last_s

    def _slot(self, rank: int, number: int) -> int:
        return rank * self.SLOTS + number % self.SLOTS


class WaitedWork:
    """A work of gloo that cannot tell when it is complete: a thread waits for it."""

    def __init__(self, inner: Any, on_done: Callable[[], None]) -> None:
        self._inner = inner
        self._on_done = on_done
        self._done = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._inner.wait()
        except Exception as error:
            self._error = error
        else:
            self._on_done()
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> Exception | None:
        return self._error

    def wait(self, timeout: timedelta) -> None:
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"not done after {seconds} s")
        if self._error is not None:
            raise self._error


class LinkWork(dist.Work):
    """A collective in flight, as torch.distributed sees it: the works of gloo that move its bytes,
    and its transfer over the emulated link, None on a real one. `timeout` is the group's."""

    def __init__(
        self,
        record: Record,
        inner: Sequence[Any],
        transfer: Transfer | None,
        timeout: timedelta,
    ):
        super().__init__()
        self._timeout = timeout
        self._record = record
        self._inner = inner
        self._transfer = transfer
        self._error: BaseException | None = None
        self._is_done = False

    def is_completed(self) -> bool:
        if not self._is_done and all(work.is_completed() for work in self._inner):
            error = next((e for work in self._inner if (e := work.exception())), None)
            if error is not None:
                self._fail(error)
            transfer = self._transfer
            self._is_done = transfer is None or process_link().is_off(transfer)
        return self._is_done

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done. Raises what gloo raised, or RuntimeError after `timeout`."""
        record, enter_s = self._record, time.monotonic()
        self._finish(timeout)
        if math.isnan(record.wait_enter_s):
            record.wait_enter_s, record.wait_exit_s = enter_s, time.monotonic()
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed by a thread of its own."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                self._finish(timedelta(0))
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(_results(self._inner))

        threading.Thread(target=complete, name=EMULATED, daemon=True).start()
        return future

    def _fail(self, error: BaseException) -> None:
        self._error = error
        if self._transfer is not None:
            process_link().drop(self._transfer)
        self._transfer = None

    def _finish(self, timeout: timedelta) -> None:
        seconds = (timeout or self._timeout).total_seconds()
        until_s = time.monotonic() + seconds
        try:
            for work in self._inner:
                work.wait(timeout)
        except Exception as error:
            self._fail(error)
            raise
        transfer, record = self._transfer, self._record
        if transfer is not None and not process_link().wait(transfer, until_s):
            raise RuntimeError(
                f"{record.kind} of group {record.group!r} is not done after {seconds} s"
            )
        self._is_done = True


class LinkGroup(dist.ProcessGroup):
    """A group whose bytes move with gloo and whose collectives take their time on the link.

    Bytes on the link, of an operand of S bytes and n ranks: all-gather (S: the output),
    reduce-scatter and all-to-all S(n-1)/n, uneven splits the larger of what leaves and what enters
    this rank; all-reduce 2S(n-1)/n; broadcast and the point-to-point ones S.
    """

    def __init__(self, backend: str, options: Any):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  # not in the stubs
        self._backend = backend
        self._name = options.group_id
        self._timeout: timedelta = options.timeout
        self._link = process_link()
        self._lane = object()
        store = dist.PrefixStore("gloo/", options.store)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options.timeout)
        self._board = StartBoard(store, rank, size) if backend == EMULATED and size > 1 else None
        self._waiters: dict[Any, queue.SimpleQueue[WaitedWork | None]] = {}

    # What torch.distributed asks of a group.

    def getBackendName(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    # Collectives: the names and arguments of c10d::ProcessGroup, which calls these by name.

    def allreduce(self, tensors: list[Tensor], opts: Any) -> LinkWork:
        works = [self._gloo.allreduce(tensors, opts)]
        return self._start("all_reduce", 2 * self._leaving(tensors), works)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> LinkWork:
        works = [self._gloo.allreduce_coalesced(tensors, opts)]
        return self._start("all_reduce", 2 * self._leaving(tensors), works)

    def reduce(self, tensors: list[Tensor], opts: Any) -> LinkWork:
        return self._start("reduce", _bytes(tensors), [self._gloo.reduce(tensors, opts)])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> LinkWork:
        return self._start("broadcast", _bytes(tensors), [self._gloo.broadcast(tensors, opts)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> LinkWork:
        works = [self._gloo.allgather(outputs, inputs, opts)]
        return self._start("all_gather", self._leaving(itertools.chain(*outputs)), works)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> LinkWork:
        works = [self._gloo.allgather_coalesced(outputs, inputs, opts)]
        return self._start("all_gather", self._leaving(itertools.chain(*outputs)), works)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> LinkWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> LinkWork:
        pairs = zip(outputs, inputs, strict=True)
        works = [self._gloo._allgather_base(output, source, opts) for output, source in pairs]
        return self._start("all_gather", self._leaving(outputs), works)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> LinkWork:
        works = [self._gloo.reduce_scatter(outputs, inputs, opts)]
        return self._start("reduce_scatter", self._leaving(itertools.chain(*inputs)), works)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> LinkWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> LinkWork:
        pairs = zip(outputs, inputs, strict=True)
        works = [self._gloo._reduce_scatter_base(output, source, opts) for output, source in pairs]
        return self._start("reduce_scatter", self._leaving(inputs), works)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> LinkWork:
        works = [self._gloo.alltoall_base(output, source, output_splits, input_splits, opts)]
        leaves, enters = self._foreign(source, input_splits), self._foreign(output, output_splits)
        return self._start("all_to_all", max(leaves, enters), works)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> LinkWork:
        works = [self._gloo.alltoall(outputs, inputs, opts)]
        leaves = _bytes(t for rank, t in enumerate(inputs) if rank != self.rank())
        enters = _bytes(t for rank, t in enumerate(outputs) if rank != self.rank())
        return self._start("all_to_all", max(leaves, enters), works)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> LinkWork:
        works = [self._gloo.gather(outputs, inputs, opts)]
        num_bytes = self._leaving(itertools.chain(*outputs)) or _bytes(inputs)
        return self._start("gather", num_bytes, works)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> LinkWork:
        works = [self._gloo.scatter(outputs, inputs, opts)]
        num_bytes = self._leaving(itertools.chain(*inputs)) or _bytes(outputs)
        return self._start("scatter", num_bytes, works)

    def barrier(self, opts: Any) -> LinkWork:
        return self._start("barrier", 0.0, [self._gloo.barrier(opts)])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> LinkWork:
        work = self._gloo.send(tensors, peer, tag)
        return self._start_one_way("send", (peer, tag), tensors, work)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> LinkWork:
        work = self._gloo.recv(tensors, peer, tag)
        return self._start_one_way("receive", (peer, tag), tensors, work)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> LinkWork:
        work = self._gloo.recv_anysource(tensors, tag)
        return self._start_one_way("receive", (None, tag), tensors, work)

    # These call the above where a caller still uses the older names.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def shutdown(self) -> None:
        for waits in self._waiters.values():
            waits.put(None)
        self._gloo.shutdown()

    def abort(self) -> None:
        self._gloo.abort()

    def _leaving(self, tensors: Iterable[Tensor]) -> float:
        return _bytes(tensors) * (self.size() - 1) / self.size()

    def _foreign(self, tensor: Tensor, splits: Sequence[int]) -> float:
        """Bytes of the rows that are for, or from, other ranks."""
        if not splits:
            return self._leaving([tensor])
        rows = sum(splits)
        return tensor.nbytes * (rows - splits[self.rank()]) / rows if rows else 0.0

    def _start(self, kind: str, num_bytes: float, works: list[Any]) -> LinkWork:
        """A collective of all ranks: the link starts it when the last of them has started it."""
        record = Record(kind, self._name, num_bytes, issue_s=time.monotonic())
        if self._backend == RECORDED:
            return self._start_recorded(record, works)
        board, issue_s = self._board, record.issue_s
        if board is None:
            return self._start_emulated(record, works, self._lane, lambda: issue_s)
        number = board.post(issue_s)
        return self._start_emulated(record, works, self._lane, lambda: board.started(number))

    def _start_one_way(
        self, kind: str, partner: tuple[int | None, int], tensors: list[Tensor], inner: Any
    ) -> LinkWork:
        """A message: on the link from its start on, for the receiver from when it is here on.
        `partner` is the other rank and the message's tag."""
        record = Record(kind, self._name, _bytes(tensors), issue_s=time.monotonic())
        channel = (kind, *partner)
        if self._backend == RECORDED:
            return self._start_recorded(record, [inner], channel)
        arrived_s: list[float] = []
        work = self._waited(channel, inner, lambda: arrived_s.append(time.monotonic()))

        def started() -> float | None:
            if kind == "send":
                return record.issue_s
            return arrived_s[0] if arrived_s else None

        return self._start_emulated(record, [work], (self._lane, channel), started, (kind,))

    def _start_emulated(
        self,
        record: Record,
        works: list[Any],
        lane: Any,
        started: Callable[[], float | None],
        directions: tuple[str, ...] = FULL_DUPLEX,
    ) -> LinkWork:
        transfer = Transfer(
            record, started, record.num_bytes, self._link.latency_s, directions=directions
        )
        self._link.submit(lane, transfer)
        return LinkWork(record, works, transfer, self._timeout)

    def _start_recorded(self, record: Record, works: list[Any], channel: Any = None) -> LinkWork:
        """On a real link: it has the collective from its start until gloo's last work is done."""
        record.start_s = record.issue_s
        self._link.note(record)

        def moved(_: Any = None) -> None:
            record.end_s = time.monotonic()

        seen: list[Any] = []
        for inner in works:
            try:
                inner.get_future().add_done_callback(moved)
            except RuntimeError:  # messages and reduce-scatters have none
                inner = self._waited(channel, inner, moved)
            seen.append(inner)
        return LinkWork(record, seen, None, self._timeout)

    def _waited(self, channel: Any, inner: Any, on_done: Callable[[], None]) -> WaitedWork:
        """The work `inner`, waited for by the thread of its channel, one after the other."""
        if channel not in self._waiters:
            works: queue.SimpleQueue[WaitedWork | None] = queue.SimpleQueue()
            self._waiters[channel] = works
            threading.Thread(
                target=_run_in_turn, args=(works,), name=self._backend, daemon=True
            ).start()
        work = WaitedWork(inner, on_done)
        self._waiters[channel].put(work)
        return work


def _results(works: Sequence[Any]) -> list[Tensor]:
    """The tensors that gloo's works have written, which DDP reads from the future."""
    results: list[Tensor] = []
    for work in works:
        with contextlib.suppress(RuntimeError):  # messages and reduce-scatters have no future
            results += work.get_future().value()
    return results


def _run_in_turn(works: queue.SimpleQueue[WaitedWork | None]) -> None:
    while work := works.get():
        work.run()


def _bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))
