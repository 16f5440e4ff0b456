"""Peak memory: what a known program takes."""

from __future__ import annotations

import torch

from overlap.runtime import memory

MB = 1 << 20


def test_the_peak_is_counted_and_what_was_there_is_not():
    x = torch.ones(MB)

    def run() -> None:
        y = x + 1  # 4 MB
        z = y * 2  # 8 MB
        del y
        assert z.sum().item() == 4 * MB

    peak = memory.peak_bytes(run)
    assert 8 * MB <= peak < 8 * MB + 1000


def test_a_leak_is_no_peak_of_the_next_run():
    kept: list[torch.Tensor] = []
    assert memory.peak_bytes(lambda: kept.append(torch.empty(MB))) >= 4 * MB
    assert memory.peak_bytes(lambda: None) == 0
