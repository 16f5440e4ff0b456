"""Local ranks: results come back, a rank that fails is named, nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap.errors import ConfigError, DivergenceError, RankError
from overlap.runtime.launch import LaunchOptions, launch, launch_script

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


def add_up(pids: str, offset: float) -> dict[str, Any]:
    note_pid(pids)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.all_reduce(total := torch.tensor([rank + offset]))
    dist.barrier()
    dist.destroy_process_group()
    return {
        "total": total,
        "rank": rank,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "mkl": os.environ.get("MKL_CBWR"),
    }


def fail(pids: str, how: str) -> None:
    note_pid(pids)
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        match how:
            case "raise":
                raise ValueError("the third expert is empty")
            case "differ":
                raise DivergenceError("rank 0 and rank 1 decided differently")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                os._exit(7)
    dist.all_reduce(torch.ones(1))
    time.sleep(600)


def sleep(pids: str) -> None:
    note_pid(pids)
    time.sleep(600)


def note_pid(directory: str) -> None:
    (Path(directory) / str(os.getpid())).touch()


def assert_none_runs(directory: Path, num_ranks: int = 2) -> None:
    pids = [int(path.name) for path in directory.iterdir()]
    assert len(pids) == num_ranks
    assert [pid for pid in pids if is_running(pid)] == []


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_results_come_back_by_rank(tmp_path: Path):
    handler = signal.getsignal(signal.SIGTERM)
    options = LaunchOptions(env={"MKL_CBWR": "AVX512,STRICT"})
    first, second = launch(add_up, str(tmp_path), 0.5, options=options)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["total"] == second["total"] == 2.0
    assert (first["threads"], first["mkl"]) == (1, "AVX512,STRICT")
    if len(os.sched_getaffinity(0)) >= 2:
        assert len(first["cores"]) == len(second["cores"]) == 1
        assert first["cores"] != second["cores"]
    assert "MKL_CBWR" not in os.environ or os.environ["MKL_CBWR"] != "AVX512,STRICT"
    assert signal.getsignal(signal.SIGTERM) is handler
    assert_none_runs(tmp_path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 1 failed (exit code 1): ValueError: the third expert is empty\nTraceback"),
        ("differ", "rank 1 failed (exit code 1): overlap.errors.DivergenceError: rank 0 and rank"),
        ("kill", "rank 1 was killed by SIGKILL"),
        ("exit", "rank 1 exited with code 7, without a Python exception"),
    ],
)
def test_the_rank_that_fails_is_named(tmp_path: Path, how: str, message: str):
    with pytest.raises(RankError) as raised:
        launch(fail, str(tmp_path), how)
    assert str(raised.value).startswith(message)
    assert isinstance(raised.value, DivergenceError) == (how == "differ")
    assert how != "raise" or 'raise ValueError("the third expert is empty")' in str(raised.value)
    assert_none_runs(tmp_path)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_rank(tmp_path: Path, stop: signal.Signals):
    program = (
        "from overlap.runtime.launch import launch\n"
        "from tests.runtime.test_launch import sleep\n"
        f"if __name__ == '__main__': launch(sleep, {str(tmp_path)!r})\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        launcher.send_signal(stop)
        code = launcher.wait(60)
    finally:
        launcher.kill()
    assert code == {signal.SIGTERM: 128 + stop}.get(stop, -stop)
    wait_until(lambda: not any(is_running(int(path.name)) for path in tmp_path.iterdir()))
    assert_none_runs(tmp_path)


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_script_gets_its_arguments(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(' '.join(sys.argv[2:]))\n"
        "sys.exit(0)\n"
    )
    (written := tmp_path / "written").mkdir()
    launch_script(script, [str(written), "--slices", "4"])
    assert {path.name: path.read_text() for path in written.iterdir()} == {
        "0": "--slices 4",
        "1": "--slices 4",
    }


def test_mistakes_are_the_callers():
    with pytest.raises(ConfigError, match=r"no script .missing\.py.; expected the path"):
        launch_script("missing.py")
    with pytest.raises(ConfigError, match="num_ranks is 0; expected at least 1"):
        LaunchOptions(num_ranks=0)
