"""Run a function on a few local ranks, for tests.

`run_ranks(fn, 2)` starts two processes, each with a process group, calls `fn(rank, world)` in both
and returns what they returned. The processes are forked from a server that has torch loaded, so
only the first call of a session pays for the import.

Every rank computes with one thread and with MKL's bitwise reproducible kernels. `fn`, its arguments
and its results travel by pickle: `fn` is a function of a module, and tensors arrive as copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from overlap.errors import RankError

RANK_ENV = {
    "GLOO_SOCKET_IFNAME": "lo",
    "MKL_CBWR": "AVX512,STRICT",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
PRELOADED = [
    "torch",
    "torch.distributed._functional_collectives",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "overlap.backend",
]
GRACE_S = 5.0
CAUSE_S = 0.2  # how long a failure waits for an earlier one that made it fail
PR_SET_PDEATHSIG = 1


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """`[fn(rank, world_size, *args) for each rank]`, each in its own process and the same group.

    Raises RankError for the first rank that raises or dies, with its traceback, and for one that is
    not done after `timeout_s`, with the stack it was stuck in. No process is left either way.
    `env` is set in the ranks before the group is made (torch is loaded by then).
    """
    payload = pickle.dumps((fn, args))
    _start_server()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as directory:
        ranks: list[tuple[BaseProcess, connection.Connection]] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                setup = (rank, world_size, backend, timeout_s, directory, dict(env or {}))
                process = context.Process(
                    target=_rank_main, args=(theirs, payload, *setup), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            return _collect(ranks, Path(directory), timeout_s)
        finally:
            for process, ours in ranks:
                ours.close()
                process.kill()
            for process, _ in ranks:
                process.join()
                process.close()


def _start_server() -> None:
    multiprocessing.set_forkserver_preload(PRELOADED)
    with _environment(RANK_ENV):  # the server passes on what it was started with
        forkserver.ensure_running()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(
    ranks: list[tuple[BaseProcess, connection.Connection]], directory: Path, timeout_s: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[float, RankError]] = []
    waiting = {ours: rank for rank, (_, ours) in enumerate(ranks)}
    deadline = time.monotonic() + timeout_s
    while waiting and (ready := _wait(waiting, deadline)):
        for ours in ready:
            rank = waiting.pop(ours)
            when, is_ok, value = _receive(ranks[rank][0], ours)
            if is_ok:
                results[rank] = value
                continue
            failures.append((when, RankError(f"rank {rank} {value}")))
            deadline = min(deadline, time.monotonic() + CAUSE_S)
    if failures:
        raise min(failures, key=lambda failure: failure[0])[1]
    if waiting:
        stuck = min(waiting.values())
        stack = _stack(ranks[stuck][0], directory / f"stack{stuck}")
        raise RankError(
            f"rank {stuck} is not done after {timeout_s} s; done: {sorted(results)}; "
            f"its stack:\n{stack}"
        )
    for process, ours in ranks:  # all are done: hanging up lets them leave together
        ours.close()
        process.join(GRACE_S)
    return [results[rank] for rank in range(len(ranks))]


def _wait(
    waiting: Mapping[connection.Connection, int], deadline: float
) -> list[connection.Connection]:
    ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
    return [ours for ours in waiting if ours in ready]


def _receive(process: BaseProcess, ours: connection.Connection) -> tuple[float, bool, Any]:
    """When the rank ended, whether well, and its result or what it left."""
    try:
        return pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join(GRACE_S)
        return 0.0, False, f"died without a word: {_exit(process.exitcode)}"


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _stack(process: BaseProcess, path: Path) -> str:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not path.stat().st_size:
        time.sleep(0.02)
    return path.read_text()


def _rank_main(
    theirs: connection.Connection,
    payload: bytes,
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float,
    directory: str,
    env: dict[str, str],
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed test run leaves no rank
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    with open(Path(directory) / f"stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        try:
            result = _run(payload, rank, world_size, backend, timeout_s, directory)
            message = pickle.dumps((time.monotonic(), True, result))
        except BaseException:
            report = f"raised:\n{traceback.format_exc()}"
            theirs.send_bytes(pickle.dumps((time.monotonic(), False, report)))
            os._exit(1)  # peers that wait for this rank see its connections close at once
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        theirs.send_bytes(message)
        with contextlib.suppress(EOFError, ConnectionResetError):
            theirs.recv_bytes()  # keep the group until every rank is done with it
    os._exit(0)


def _run(
    payload: bytes, rank: int, world_size: int, backend: str, timeout_s: float, directory: str
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "emulated":
        from overlap.runtime import link_group

        link_group.register()
    fn, args = pickle.loads(payload)
    dist.init_process_group(
        backend,
        init_method=None if backend == "fake" else f"file://{directory}/store",
        store=_fake_store() if backend == "fake" else None,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    return fn(rank, world_size, *args)


def _fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
