"""The emulated link: a process-group backend that takes as long as a network of a given bandwidth.

Two ranks of one machine have no network between them, so there is nothing to hide: the bytes are
there at once, or copying them costs the CPU that should compute. The backend `emulated` moves the
real bytes with gloo and completes each collective no earlier than a link would:

    link.register(LinkConfig(bandwidth_mbit=400))
    dist.init_process_group("emulated", ...)

    group ep   |== all_to_all ==|=== all_to_all ===|            a FIFO per lane
    group dp            |.. reduce_scatter ..|                  lanes share the bandwidth
                ^ every rank is here         ^ bytes / bandwidth later, and the bytes have arrived

A lane is a group, or one peer and direction of its point-to-point traffic. A transfer starts when
every rank has started it (they tell each other in eight bytes; the clock is the machine's, so all
ranks are of one machine) and its lane is free. The link is full duplex. Times are played as
discrete events, so that a thread that the kernel wakes late delays a completion, not the link.

Backend `recorded` is gloo with the same records and no emulation: for real links.

A figure measured with this backend is to be called emulated wherever it is shown.
"""

# torch's stubs give other parameter names than c10d calls with:
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
from __future__ import annotations

import functools
import itertools
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from overlap.errors import ConfigError

EMULATED = "emulated"
RECORDED = "recorded"
ENV_BANDWIDTH = "OVERLAP_LINK_MBIT"
ENV_LATENCY = "OVERLAP_LINK_LATENCY_US"

FULL_DUPLEX = ("send", "receive")

Act = Callable[[BaseException | None], None]


@dataclass(frozen=True)
class LinkConfig:
    """What the emulated link is like.

    bandwidth_mbit: bandwidth of each direction, in 10^6 bits per second.
    latency_us: added to every transfer.
    """

    bandwidth_mbit: float = 400.0
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_mbit < math.inf:
            raise ConfigError(
                f"bandwidth_mbit of the emulated link is {self.bandwidth_mbit!r}; expected > 0"
            )
        if not 0 <= self.latency_us < math.inf:
            raise ConfigError(
                f"latency_us of the emulated link is {self.latency_us!r}; expected >= 0"
            )

    @classmethod
    def from_env(cls) -> LinkConfig:
        """The defaults, changed by OVERLAP_LINK_MBIT and OVERLAP_LINK_LATENCY_US."""
        return cls(
            bandwidth_mbit=_env_number(ENV_BANDWIDTH, cls.bandwidth_mbit),
            latency_us=_env_number(ENV_LATENCY, cls.latency_us),
        )


def _env_number(name: str, default: float) -> float:
    text = os.environ.get(name, str(default))
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} is {text!r}; expected a number") from None


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


def _emulated_group(options: Any, _: Any) -> EmulatedGroup:
    return EmulatedGroup(EMULATED, options)


def _recorded_group(options: Any, _: Any) -> EmulatedGroup:
    return EmulatedGroup(RECORDED, options)


@functools.cache
def process_link() -> Link:
    """The link that all groups of this process share."""
    return Link(LinkConfig.from_env())


# ---- what happened ------------------------------------------------------------------------------


@dataclass(eq=False)
class Record:
    """One collective. Times are of time.monotonic(), in seconds; NaN: not (yet) happened.

    issue_s: the caller started it. start_s: every rank had, and its lane was free.
    end_s: its bytes had left the link and arrived. wait_enter_s, wait_exit_s: the first wait on it.
    """

    kind: str
    group: str
    num_bytes: float
    issue_s: float
    start_s: float = math.nan
    end_s: float = math.nan
    wait_enter_s: float = math.nan
    wait_exit_s: float = math.nan


@dataclass
class Recording:
    """The collectives started while recording, in the order of their starts."""

    records: list[Record] = field(default_factory=list)

    @property
    def comm_s(self) -> float:
        """How long at least one collective was on the link."""
        return _covered((record.start_s, record.end_s) for record in self.records)

    @property
    def exposed_s(self) -> float:
        """How long the caller was blocked in a wait; waiting for a late rank counts."""
        return _covered((record.wait_enter_s, record.wait_exit_s) for record in self.records)

    @property
    def hidden(self) -> float:
        """The part of the communication that was not waited for, from 0 to 1."""
        return max(0.0, 1.0 - self.exposed_s / self.comm_s) if self.comm_s else 0.0

    @property
    def num_bytes(self) -> float:
        return sum(record.num_bytes for record in self.records)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of the intervals that have both ends."""
    total, covered_to = 0.0, -math.inf
    for start, end in sorted(i for i in intervals if not math.isnan(i[0] + i[1])):
        total += max(0.0, end - max(start, covered_to))
        covered_to = max(covered_to, end)
    return total


# ---- the link -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Transfer:
    """A collective on its way: what is left to move, and what has to happen before it is done.

    num_moving: how many of the inner group's works are not complete; moved_s: when all were.
    agreed_s: when the last rank started the collective, None while not known.
    off_link_s: when its last byte left the link, None while it has not.
    """

    record: Record
    finish: Act
    num_moving: int
    left_bytes: float = 0.0
    latency_s: float = 0.0
    directions: tuple[str, ...] = ()
    agreed_s: float | None = None
    off_link_s: float | None = None
    moved_s: float = 0.0
    error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or (self.off_link_s is not None and not self.num_moving)


@dataclass(eq=False)
class Lane:
    """Transfers that follow one another: the first is on the link, or will be next."""

    transfers: deque[Transfer] = field(default_factory=deque)
    free_s: float = 0.0


class Link:
    """The bandwidth that the lanes of one process share.

    `config` may be set; `busy_s` is how long anything was on the link so far; `record()` collects
    what happens. The rest is for the process groups.

    The clock stands at the last event: a transfer comes onto the link, or leaves it. Between two
    events the transfers of one direction move at an equal share of the bandwidth.
    """

    def __init__(self, config: LinkConfig):
        self.config = config
        self.busy_s = 0.0
        self._clock_s = 0.0
        self._lanes: dict[Any, Lane] = {}
        self._on_link: list[Transfer] = []
        self._recordings: list[Recording] = []
        self._changed = threading.Condition()
        self._timer: threading.Thread | None = None
        self._timer_until_s = math.inf

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.config.bandwidth_mbit * 1e6 / 8

    @property
    def latency_s(self) -> float:
        return self.config.latency_us * 1e-6

    @contextmanager
    def record(self) -> Generator[Recording]:
        """Collect a record of every collective that is started inside the `with`."""
        recording = Recording()
        with self._changed:
            self._recordings.append(recording)
        try:
            yield recording
        finally:
            with self._changed:
                self._recordings.remove(recording)

    def submit(self, lane: Any, transfer: Transfer) -> None:
        """Queue the transfer; then `arrived` and `moved` say how it fares on the machine."""
        with self._changed:
            if self._timer is None:
                self._timer = threading.Thread(target=self._keep_time, name=EMULATED, daemon=True)
                self._timer.start()
            self._lanes.setdefault(lane, Lane()).transfers.append(transfer)
            for recording in self._recordings:
                recording.records.append(transfer.record)

    def arrived(self, transfer: Transfer, when_s: float, error: BaseException | None) -> None:
        """All ranks had started the transfer at `when_s`, or never will."""
        with self._changed:
            transfer.agreed_s = when_s
            transfer.error = transfer.error or error
            finished = self._play()
        _finish(finished)

    def moved(self, transfer: Transfer, error: BaseException | None) -> None:
        """One of the transfer's inner works is complete, or failed."""
        with self._changed:
            transfer.num_moving -= 1
            transfer.moved_s = time.monotonic()
            transfer.error = transfer.error or error
            finished = self._play()
        _finish(finished)

    def _keep_time(self) -> None:
        while True:
            with self._changed:
                self._timer_until_s = self._next_event()[0]
                wait_s = self._timer_until_s - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(None if math.isinf(wait_s) else wait_s)
                finished = self._play()
            _finish(finished)

    def _play(self) -> list[Transfer]:
        """Play the events up to now, under the lock; returns the transfers that are done."""
        now = time.monotonic()
        finished = self._pop_done()
        event_s, transfer = self._next_event()
        while transfer is not None and event_s <= now:
            self._step(event_s, transfer)
            finished += self._pop_done()
            event_s, transfer = self._next_event()
        if event_s < self._timer_until_s:
            self._changed.notify()
        return finished

    def _next_event(self) -> tuple[float, Transfer | None]:
        """When the next transfer comes onto the link or leaves it, and which."""
        event: tuple[float, Transfer | None] = math.inf, None
        for lane in self._lanes.values():
            if not lane.transfers:
                continue
            head = lane.transfers[0]
            if head.agreed_s is None or head.off_link_s is not None:
                continue
            if head in self._on_link:
                when_s = self._clock_s + head.left_bytes / self._rate(head)
            else:
                when_s = max(self._clock_s, max(head.agreed_s, lane.free_s) + head.latency_s)
            if when_s < event[0]:
                event = when_s, head
        return event

    def _rate(self, transfer: Transfer) -> float:
        """Bytes per second while the link is shared as it is now."""
        sharing = [
            sum(direction in other.directions for other in self._on_link)
            for direction in transfer.directions
        ]
        return self.bandwidth_bytes_per_s / max(sharing, default=1)

    def _step(self, event_s: float, transfer: Transfer) -> None:
        passed_s = event_s - self._clock_s
        moved = [(other, passed_s * self._rate(other)) for other in self._on_link]
        for other, num_bytes in moved:
            other.left_bytes = max(0.0, other.left_bytes - num_bytes)
        if self._on_link:
            self.busy_s += passed_s
        self._clock_s = event_s
        if transfer not in self._on_link:
            transfer.record.start_s = event_s - transfer.latency_s
            self._on_link.append(transfer)
            return
        self._on_link.remove(transfer)
        transfer.off_link_s = event_s

    def _pop_done(self) -> list[Transfer]:
        done: list[Transfer] = []
        for lane in self._lanes.values():
            while lane.transfers and lane.transfers[0].is_done:
                transfer = lane.transfers.popleft()
                if transfer in self._on_link:  # it failed
                    self._on_link.remove(transfer)
                if transfer.off_link_s is not None:
                    lane.free_s = max(transfer.off_link_s, transfer.moved_s)
                    transfer.record.end_s = lane.free_s
                done.append(transfer)
        return done


def _finish(transfers: list[Transfer]) -> None:
    """Tell the callers; outside the link's lock, for their callbacks may start collectives."""
    for transfer in transfers:
        transfer.finish(transfer.error)


# ---- the process group --------------------------------------------------------------------------


class EmulatedWork(dist.Work):
    """A collective in flight, as torch.distributed sees it."""

    def __init__(self, record: Record):
        super().__init__()
        self._record = record
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(None)
        elif isinstance(error, Exception):
            self._future.set_exception(error)

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done. Raises what the inner group raised, or RuntimeError after `timeout`."""
        record, enter_s = self._record, time.monotonic()
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if seconds > 0 else None):
            raise RuntimeError(
                f"{record.kind} of group {record.group!r} is not done after {seconds} s"
            )
        if math.isnan(record.wait_enter_s):
            record.wait_enter_s, record.wait_exit_s = enter_s, time.monotonic()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class EmulatedGroup(dist.ProcessGroup):
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
        self._link = process_link()
        self._lane = object()
        store = dist.PrefixStore("gloo/", options.store)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options.timeout)
        self._waiters: dict[Any, queue.SimpleQueue[tuple[Callable[[], Any], Act] | None]] = {}

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

    def allreduce(self, tensors: list[Tensor], opts: Any) -> EmulatedWork:
        works = [self._gloo.allreduce(tensors, opts)]
        return self._start("all_reduce", 2 * self._leaving(tensors), works)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> EmulatedWork:
        works = [self._gloo.allreduce_coalesced(tensors, opts)]
        return self._start("all_reduce", 2 * self._leaving(tensors), works)

    def reduce(self, tensors: list[Tensor], opts: Any) -> EmulatedWork:
        return self._start("reduce", _bytes(tensors), [self._gloo.reduce(tensors, opts)])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> EmulatedWork:
        return self._start("broadcast", _bytes(tensors), [self._gloo.broadcast(tensors, opts)])

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> EmulatedWork:
        works = [self._gloo.allgather(outputs, inputs, opts)]
        return self._start("all_gather", self._leaving(itertools.chain(*outputs)), works)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> EmulatedWork:
        works = [self._gloo.allgather_coalesced(outputs, inputs, opts)]
        return self._start("all_gather", self._leaving(itertools.chain(*outputs)), works)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> EmulatedWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> EmulatedWork:
        pairs = zip(outputs, inputs, strict=True)
        works = [self._gloo._allgather_base(output, source, opts) for output, source in pairs]
        return self._start("all_gather", self._leaving(outputs), works)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> EmulatedWork:
        works = [self._gloo.reduce_scatter(outputs, inputs, opts)]
        return self._start("reduce_scatter", self._leaving(itertools.chain(*inputs)), works)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> EmulatedWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> EmulatedWork:
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
    ) -> EmulatedWork:
        works = [self._gloo.alltoall_base(output, source, output_splits, input_splits, opts)]
        leaves, enters = self._foreign(source, input_splits), self._foreign(output, output_splits)
        return self._start("all_to_all", max(leaves, enters), works)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> EmulatedWork:
        works = [self._gloo.gather(outputs, inputs, opts)]
        num_bytes = self._leaving(itertools.chain(*outputs)) or _bytes(inputs)
        return self._start("gather", num_bytes, works)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> EmulatedWork:
        works = [self._gloo.scatter(outputs, inputs, opts)]
        num_bytes = self._leaving(itertools.chain(*inputs)) or _bytes(outputs)
        return self._start("scatter", num_bytes, works)

    def barrier(self, opts: Any) -> EmulatedWork:
        return self._start("barrier", 0.0, [self._gloo.barrier(opts)])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> EmulatedWork:
        work = self._gloo.send(tensors, peer, tag)
        return self._start_one_way("send", (peer, tag), _bytes(tensors), work)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> EmulatedWork:
        work = self._gloo.recv(tensors, peer, tag)
        return self._start_one_way("receive", (peer, tag), _bytes(tensors), work)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> EmulatedWork:
        work = self._gloo.recv_anysource(tensors, tag)
        return self._start_one_way("receive", (None, tag), _bytes(tensors), work)

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

    def _start(self, kind: str, num_bytes: float, works: list[Any]) -> EmulatedWork:
        """A collective of all ranks: the link starts it when the last of them has started it."""
        work, transfer = self._submit(self._lane, kind, num_bytes, FULL_DUPLEX, len(works))
        issue_s = transfer.record.issue_s
        if self._backend == RECORDED or self.size() == 1:
            self._link.arrived(transfer, issue_s, None)
        else:
            started_s = torch.tensor([issue_s], dtype=torch.float64)
            options: Any = c10d.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self._when_complete(
                self._lane,
                self._gloo.allreduce([started_s], options),
                lambda error: self._link.arrived(transfer, started_s.item(), error),
            )
        for inner in works:
            self._when_complete(self._lane, inner, lambda error: self._link.moved(transfer, error))
        return work

    def _start_one_way(self, kind: str, channel: Any, num_bytes: float, inner: Any) -> EmulatedWork:
        """A message: on the link from its start on, for the receiver from when it is here on."""
        lane = (self._lane, kind, channel)
        work, transfer = self._submit(lane, kind, num_bytes, (kind,), 1)
        if kind == "send":
            self._link.arrived(transfer, transfer.record.issue_s, None)

        def here(error: BaseException | None) -> None:
            if kind == "receive":
                self._link.arrived(transfer, time.monotonic(), error)
            self._link.moved(transfer, error)

        self._when_complete(lane, inner, here)
        return work

    def _submit(
        self, lane: Any, kind: str, num_bytes: float, directions: tuple[str, ...], num_works: int
    ) -> tuple[EmulatedWork, Transfer]:
        record = Record(kind, self._name, num_bytes, issue_s=time.monotonic())
        work = EmulatedWork(record)
        transfer = Transfer(record, work.finish, num_works)
        if self._backend == EMULATED:
            transfer.left_bytes = num_bytes
            transfer.latency_s = self._link.latency_s
            transfer.directions = directions
        self._link.submit(lane, transfer)
        return work, transfer

    def _when_complete(self, lane: Any, inner: Any, act: Act) -> None:
        """Call `act`, on another thread, with the error of gloo's work `inner` or None."""
        try:
            future = inner.get_future()
        except RuntimeError:  # messages and reduce-scatters have none
            if lane not in self._waiters:
                self._waiters[lane] = queue.SimpleQueue()
                threading.Thread(
                    target=_wait_in_turn, args=(self._waiters[lane],), name=EMULATED, daemon=True
                ).start()
            self._waiters[lane].put((inner.wait, act))
        else:
            future.add_done_callback(lambda future: _tell(future.value, act))


def _wait_in_turn(waits: queue.SimpleQueue[tuple[Callable[[], Any], Act] | None]) -> None:
    """Wait for works of one lane, one after the other, until None comes."""
    while item := waits.get():
        _tell(*item)


def _tell(wait: Callable[[], Any], act: Act) -> None:
    try:
        wait()
    except Exception as error:
        act(error)
    else:
        act(None)


def _bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))
