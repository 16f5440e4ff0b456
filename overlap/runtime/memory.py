"""Peak memory of a piece of code, as the allocator sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

METHOD = "what torch's profiler sees its allocator hand out and take back in one untimed step"


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that CPU tensors made by `run()` took at once, on top of what was there before.

    torch keeps no peak counter for CPU memory. The profiler slows the code that it watches, so
    nothing may be timed in the same call.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events: list[Any] = profiled.profiler.kineto_results.events()  # the stubs lack `nbytes`
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    alive = peak = 0
    for _, num_bytes in sorted(changes, key=lambda change: change[0]):
        alive += num_bytes
        peak = max(peak, alive)
    return peak
