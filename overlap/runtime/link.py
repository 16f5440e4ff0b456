"""The emulated link: a process-group backend that takes as long as a network of a given bandwidth.

Two ranks of one machine have no network between them, so there is nothing to hide: the bytes are
there at once, or copying them costs the CPU that should compute. The backend `emulated` moves the
real bytes with gloo and completes each collective no earlier than a link would:

    link.register(LinkConfig(bandwidth_mbit=400))
    dist.init_process_group("emulated", ...)

    group ep   |== all_to_all ==|=== all_to_all ===|            a FIFO per lane
    group dp            |.. reduce_scatter ..|                  lanes share the bandwidth
                ^ every rank is here         ^ bytes / bandwidth later, and the bytes have arrived

A lane is a group, or one peer, direction and tag of its point-to-point traffic. A transfer starts
when every rank has started it and its lane is free. The link is full duplex. It is played as
discrete events, in its own past, by whoever waits for a transfer: no thread keeps its time, so that
it costs the ranks little more than gloo does, and a rank that the kernel wakes late sees a late
completion, not a slow link.

The process groups are in `link_group`, beside the backend `recorded`: gloo with the same records
and no emulation, for real links.

A figure measured with this link is to be called emulated wherever it is shown.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from overlap.errors import ConfigError

ENV_BANDWIDTH = "OVERLAP_LINK_MBIT"
ENV_LATENCY = "OVERLAP_LINK_LATENCY_US"

FULL_DUPLEX = ("send", "receive")
POLL_S = 1e-4  # how often a rank looks whether another one has started


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
    """A collective on its way over the link.

    started: when the last rank started the collective, None while one has not.
    off_link_s: when its last byte left the link, None while it has not.
    """

    record: Record
    started: Callable[[], float | None]
    left_bytes: float = 0.0
    latency_s: float = 0.0
    directions: tuple[str, ...] = ()
    agreed_s: float | None = None
    off_link_s: float | None = None


@dataclass(eq=False)
class Lane:
    """Transfers that follow one another: the first is on the link, or will be next."""

    transfers: deque[Transfer] = field(default_factory=deque)
    free_s: float = 0.0

    @property
    def is_unclear(self) -> bool:
        """Whether the first transfer waits for a rank that has not started it."""
        return bool(self.transfers) and self.transfers[0].agreed_s is None


class Link:
    """The bandwidth that the lanes of one process share.

    `config` may be set; `record()` collects what happens. The rest is for the process groups.

    The clock stands at the last event: a transfer comes onto the link, or leaves it. Between two
    events the transfers of one direction move at an equal share of the bandwidth.
    """

    def __init__(self, config: LinkConfig):
        self.config = config
        self._clock_s = 0.0
        self._lanes: dict[Any, Lane] = {}
        self._on_link: list[Transfer] = []
        self._recordings: list[Recording] = []
        self._lock = threading.Lock()

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
        with self._lock:
            self._recordings.append(recording)
        try:
            yield recording
        finally:
            with self._lock:
                self._play()
                self._recordings.remove(recording)

    def note(self, record: Record) -> None:
        """Show the record to whoever is recording."""
        with self._lock:
            for recording in self._recordings:
                recording.records.append(record)

    def submit(self, lane: Any, transfer: Transfer) -> None:
        """Queue the transfer behind those of its lane."""
        self.note(transfer.record)
        with self._lock:
            self._lanes.setdefault(lane, Lane()).transfers.append(transfer)

    def is_off(self, transfer: Transfer) -> bool:
        """Whether the last byte of the transfer has left the link."""
        with self._lock:
            self._play()
        return transfer.off_link_s is not None

    def wait(self, transfer: Transfer, until_s: float = math.inf) -> bool:
        """Block until the transfer is off the link, at most until `until_s`; whether it is."""
        while True:
            with self._lock:
                next_s = min(self._play(), until_s)
                is_unclear = any(lane.is_unclear for lane in self._lanes.values())
            now = time.monotonic()
            if transfer.off_link_s is not None or now >= until_s:
                return transfer.off_link_s is not None
            time.sleep(max(0.0, min(next_s - now, POLL_S) if is_unclear else next_s - now))

    def drop(self, transfer: Transfer) -> None:
        """The transfer has failed: those behind it no longer wait for it."""
        with self._lock:
            for lane in self._lanes.values():
                if transfer in lane.transfers:
                    lane.transfers.remove(transfer)
            if transfer in self._on_link:
                self._on_link.remove(transfer)

    def _play(self) -> float:
        """Play the events up to now, under the lock; returns when the next one is due."""
        now = time.monotonic()
        event_s, lane = self._next_event()
        while lane is not None and event_s <= now:
            self._step(event_s, lane)
            event_s, lane = self._next_event()
        return event_s

    def _next_event(self) -> tuple[float, Lane | None]:
        """When the next transfer comes onto the link or leaves it, and of which lane it is."""
        event: tuple[float, Lane | None] = math.inf, None
        for lane in self._lanes.values():
            when_s = self._event_of(lane)
            if when_s < event[0]:
                event = when_s, lane
        return event

    def _event_of(self, lane: Lane) -> float:
        if not lane.transfers:
            return math.inf
        head = lane.transfers[0]
        if head in self._on_link:
            return self._clock_s + head.left_bytes / self._rate(head)
        if head.agreed_s is None:
            head.agreed_s = head.started()
        if head.agreed_s is None:
            return math.inf
        return max(self._clock_s, max(head.agreed_s, lane.free_s) + head.latency_s)

    def _rate(self, transfer: Transfer) -> float:
        """Bytes per second while the link is shared as it is now."""
        sharing = [
            sum(direction in other.directions for other in self._on_link)
            for direction in transfer.directions
        ]
        return self.bandwidth_bytes_per_s / max(sharing, default=1)

    def _step(self, event_s: float, lane: Lane) -> None:
        passed_s = event_s - self._clock_s
        moved = [(other, passed_s * self._rate(other)) for other in self._on_link]
        for other, num_bytes in moved:
            other.left_bytes = max(0.0, other.left_bytes - num_bytes)
        self._clock_s = event_s
        head = lane.transfers[0]
        if head not in self._on_link:
            head.record.start_s = event_s - head.latency_s
            self._on_link.append(head)
            return
        self._on_link.remove(head)
        lane.transfers.popleft()
        head.off_link_s = head.record.end_s = lane.free_s = event_s
