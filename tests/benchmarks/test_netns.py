"""The shaped link: ranks inside it talk, and it is taken down however the block is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.netns import LinkUnavailable, shaped_link, why_unavailable
from overlap.errors import RankError

pytestmark = pytest.mark.dist


@pytest.fixture
def link():
    if reason := why_unavailable():
        pytest.skip(reason)
    try:
        with shaped_link(bandwidth_mbit=80) as made:
            yield made
    except LinkUnavailable as error:
        pytest.skip(str(error))
    assert not set(made.namespaces) & namespaces()


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


def exchange(num_bytes: int) -> tuple[int, float]:
    dist.init_process_group("gloo")
    sent = torch.full((num_bytes,), dist.get_rank(), dtype=torch.uint8)
    received = torch.empty_like(sent)
    dist.barrier()
    start_s = time.monotonic()
    dist.all_to_all_single(received, sent)
    took_s = time.monotonic() - start_s
    dist.barrier()
    dist.destroy_process_group()
    return int(received.long().sum()), took_s


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no")
    time.sleep(600)


def test_bytes_take_their_time(link):
    results = link.run(exchange, 2_000_000)
    assert [total for total, _ in results] == [1_000_000, 1_000_000]
    # 1 MB at 10 MB/s, of which a burst of 128 kB goes at once; one rank may enter the other's wait
    assert max(took_s for _, took_s in results) > 0.08


def test_a_rank_that_fails_is_named(link):
    with pytest.raises(RankError, match="rank 1 of the shaped link exited with code 1"):
        link.run(fail_on_rank_1)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_signals_take_it_down(link, stop: signal.Signals):
    program = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs\n"
        "from benchmarks.netns import shaped_link\n"
        "with shaped_link(400) as link:\n"
        "    print(*link.namespaces, flush=True)\n"
        "    link.run(time.sleep, 600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    made = set(process.stdout.readline().split())
    assert len(made & namespaces()) == 2
    process.send_signal(stop)
    process.wait(60)
    process.stdout.close()
    assert not made & namespaces()
