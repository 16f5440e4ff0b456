"""Start ranks on this machine with torch's elastic agent, as torchrun does, and get their results.

    losses = launch(train, config, options=LaunchOptions(num_ranks=2))

`train(config)` runs in two new processes, each with RANK, WORLD_SIZE, MASTER_ADDR and the rest set,
one thread, and, where the machine has a core for each, a core of its own. A rank that fails stops
all of them and is named in the error, with its exit code or signal and its traceback. SIGINT and
SIGTERM end the ranks before this process; if it is killed, the kernel ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from overlap.errors import ConfigError, DivergenceError, RankError

ENV_REPORTS = "OVERLAP_LAUNCH_REPORTS"
STOP_S = 3  # how long ranks may take to end when told to
LINGER_S = 0.5  # how long a rank that raised lives on: a peer that was killed is then seen first
REPORT_LINES = 40
STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LaunchOptions:
    """How ranks are started.

    num_ranks: how many. env: set in each before torch loads (MKL_CBWR belongs here).
    is_pinned: give each rank a core of its own where there are at least as many cores as ranks.
    """

    num_ranks: int = 2
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    is_pinned: bool = True

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError(f"num_ranks is {self.num_ranks!r}; expected at least 1")


def launch(fn: Callable[..., Any], *args: Any, options: LaunchOptions | None = None) -> list[Any]:
    """`fn(*args)` on every rank; what each returned, by rank.

    `fn` is a function of a module; arguments and results travel by pickle. Raises RankError, which
    names the rank that failed first, or DivergenceError if that is how it failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = options or LaunchOptions()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.num_ranks,
        run_id="overlap",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=STOP_S,
        signals_to_handle=",".join(STOPPING),
    )
    with tempfile.TemporaryDirectory(prefix="overlap-ranks-") as reports:
        env = {"OMP_NUM_THREADS": "1", **options.env, ENV_REPORTS: reports}
        payload = pickle.dumps((fn, args))
        with _environment(env), _signal_handlers_kept(), _agent_quiet():
            try:
                results = elastic_launch(config, _rank_main)(payload, options.is_pinned)
            except SignalException as stopped:
                if stopped.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                raise SystemExit(128 + stopped.sigval) from None
            except ChildFailedError as failed:
                raise _error_of(*failed.get_first_failure(), Path(reports)) from None
    return [pickle.loads(results[rank]) for rank in range(options.num_ranks)]


def launch_script(
    path: str | Path, argv: Sequence[str] = (), options: LaunchOptions | None = None
) -> None:
    """Run a Python script on every rank, with `argv` as its arguments; raises as `launch` does."""
    if not Path(path).is_file():
        raise ConfigError(f"no script {str(path)!r}; expected the path of a Python file")
    launch(_run_script, str(path), list(argv), options=options)


def _run_script(path: str, argv: list[str]) -> None:
    sys.argv[:] = [path, *argv]
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise


def _rank_main(payload: bytes, is_pinned: bool) -> bytes:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    if is_pinned and len(cores) >= num_ranks:
        os.sched_setaffinity(0, {cores[rank]})
    try:
        fn, args = pickle.loads(payload)
        return pickle.dumps(fn(*args))
    except BaseException as error:
        report = {
            "when": time.time(),
            "error": _one_line(error),
            "trace": traceback.format_exc(),
            "is_divergence": isinstance(error, DivergenceError),
        }
        path = Path(os.environ[ENV_REPORTS]) / f"{os.environ['RANK']}.json"
        path.write_text(json.dumps(report))
        time.sleep(LINGER_S)
        raise


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip().split("\n")[0]


def _error_of(rank: int, failure: Any, reports: Path) -> RankError:
    """Which rank failed first, how, and where. A rank without a report died; a peer's follows."""
    written = {int(path.stem): json.loads(path.read_text()) for path in reports.glob("*.json")}
    if rank not in written:
        if failure.exitcode < 0:
            return RankError(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}")
        code = failure.exitcode
        return RankError(f"rank {rank} exited with code {code}, without a Python exception")
    rank, report = min(written.items(), key=lambda item: item[1]["when"])
    trace = report["trace"].rstrip().split("\n")
    shown = trace if len(trace) <= REPORT_LINES else [trace[0], "  ...", *trace[-REPORT_LINES:]]
    kind = DivergenceError if report["is_divergence"] else RankError
    return kind("\n".join([f"rank {rank} failed (exit code 1): {report['error']}", *shown]))


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Generator[None]:
    """Ranks are started with this process's environment: set it before their torch loads."""
    before = {name: os.environ.get(name) for name in [*values, "TORCHELASTIC_SIGNALS_TO_HANDLE"]}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers_kept() -> Generator[None]:
    """The agent sets handlers and leaves them set; it sets none outside the main thread."""
    before = {name: signal.getsignal(signal.Signals[name]) for name in STOPPING}
    try:
        yield
    finally:
        for name, handler in before.items():
            if signal.getsignal(signal.Signals[name]) is not handler:
                signal.signal(signal.Signals[name], handler)


@contextlib.contextmanager
def _agent_quiet() -> Generator[None]:
    """The agent logs a failure at length; the error raised here says it once."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
