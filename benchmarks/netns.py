"""A real link of limited bandwidth on one machine: two network namespaces and a shaped veth pair.

    with shaped_link(bandwidth_mbit=400) as link:
        rows = link.run(measure, variants)

    namespace r0 (10.77.0.1) ==veth== tbf 400 Mbit/s each way ==veth== namespace r1 (10.77.0.2)

`measure(variants)` runs in one process per namespace, each on a core of its own with one thread,
with what torch.distributed's `env://` needs in its environment. Needs root and iproute2. The
namespaces carry this process's id in their names and are removed however the block is left; what a
killed process left behind, the next link removes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from overlap.errors import OverlapError, RankError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("veth0", "veth1")
PREFIX = "overlap-"
MASTER_PORT = 29501  # free: the namespaces are new
RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # the namespaces have no host names, which c10d warns of
}


class LinkUnavailable(OverlapError):
    """This machine or user cannot have a shaped link; the message says why."""


def why_unavailable() -> str | None:
    """Why this process cannot make a shaped link, None if nothing is known to prevent it."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} on the path; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


@dataclass(frozen=True)
class ShapedLink:
    """Two namespaces with a link of `bandwidth_mbit` between them."""

    namespaces: tuple[str, str]
    bandwidth_mbit: float

    def run(
        self, fn: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None
    ) -> list[Any]:
        """What `fn(*args)` returned in each namespace; both travel by pickle.

        A module that is run with `python -m` imports itself by name first: the ranks do not know
        its `__main__`. Raises RankError, naming the rank, if one fails; the other is then stopped.
        """
        with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
            call = Path(directory) / "call"
            call.write_bytes(pickle.dumps((fn, args)))
            ranks: list[subprocess.Popen[bytes]] = []
            try:
                for rank in range(2):
                    ranks.append(self._start(rank, call, env or {}))
                _wait_for(ranks)
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
            return [pickle.loads(_result(call, rank).read_bytes()) for rank in range(2)]

    def _start(self, rank: int, call: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        rank_env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACES[rank],
        }
        inside = ["ip", "netns", "exec", self.namespaces[rank]]
        return subprocess.Popen(
            [*inside, sys.executable, "-m", "benchmarks.netns", str(call)],
            env={**os.environ, **RANK_ENV, **env, **rank_env},
            cwd=Path(__file__).parents[1],
        )


@contextlib.contextmanager
def shaped_link(bandwidth_mbit: float) -> Generator[ShapedLink]:
    """Make the link, give it, take it down. Raises LinkUnavailable, with the reason."""
    if reason := why_unavailable():
        raise LinkUnavailable(f"no shaped link: {reason}")
    _remove_left_behind()
    namespaces = (f"{PREFIX}{os.getpid()}-r0", f"{PREFIX}{os.getpid()}-r1")
    with _terminate_as_exit():
        try:
            _build(namespaces, bandwidth_mbit)
            yield ShapedLink(namespaces, bandwidth_mbit)
        finally:
            for namespace in namespaces:
                _ip("netns", "del", namespace, is_required=False)


def _build(namespaces: tuple[str, str], bandwidth_mbit: float) -> None:
    for namespace in namespaces:
        _ip("netns", "add", namespace)
    (veth0, veth1), (first, second) = INTERFACES, namespaces
    _ip("link", "add", veth0, "netns", first, "type", "veth", "peer", veth1, "netns", second)
    for interface, namespace, address in zip(INTERFACES, namespaces, ADDRESSES, strict=True):
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "link", "set", interface, "mtu", "9000", "up")
        shape = f"root tbf rate {bandwidth_mbit}mbit burst 128kb latency 100ms"
        _ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", interface, *shape.split())


def _ip(*arguments: str, is_required: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if is_required and done.returncode != 0:
        raise LinkUnavailable(
            f"no shaped link: `ip {' '.join(arguments)}` said: {done.stderr.strip()}"
        )
    return done.stdout


def _remove_left_behind() -> None:
    for name, pid in re.findall(rf"^({PREFIX}(\d+)-r\d)", _ip("netns", "list"), re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            _ip("netns", "del", name, is_required=False)


@contextlib.contextmanager
def _terminate_as_exit() -> Generator[None]:
    """Let SIGTERM unwind the stack, so that the link is taken down."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_for(ranks: list[subprocess.Popen[bytes]]) -> None:
    codes: list[int | None] = [None] * len(ranks)
    while None in codes:
        time.sleep(0.05)
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                raise RankError(
                    f"rank {rank} of the shaped link {_how(code)}; "
                    "what it wrote to standard error is above"
                )


def _how(code: int) -> str:
    return f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def _result(call: Path, rank: int) -> Path:
    return call.with_name(f"result{rank}")


def _rank_main(call: Path) -> None:
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    fn, args = pickle.loads(call.read_bytes())
    _result(call, rank).write_bytes(pickle.dumps(fn(*args)))


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
