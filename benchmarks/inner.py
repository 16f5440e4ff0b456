"""Who generates the kernels: training steps of one process, the same weights and batch in turn.

    python -m benchmarks.inner [--model llama] [--config debug] [--repeats 20] [--json]

Nothing is on a wire, so that only compute counts:

    llama         without a collective: `inner="inductor"` is to be as fast as Inductor alone
    deepseek_v3   its all-to-alls in a group of one rank: what the cuts at communication cost

Variants: as written; `torch.compile(backend="inductor")`; the backend with one slice and eager
kernels; the same with Inductor's.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import models.deepseek_v3
import models.llama
from overlap.target import MeshSpec, Step

BASE = "inductor"
TARGETS: dict[str, Callable[[str | None, MeshSpec], Step]] = {
    "llama": models.llama.train_step,
    "deepseek_v3": models.deepseek_v3.train_step,
}


def variants(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Each with weights of its own."""

    def compiled(**options: Any) -> Callable[..., Any]:
        return torch.compile(copy.deepcopy(module), fullgraph=True, **options)

    def overlapped(inner: str) -> Callable[..., Any]:
        return compiled(backend="overlap", options={"slices": 1, "inner": inner})

    return {
        "eager": copy.deepcopy(module),
        BASE: compiled(backend="inductor"),
        "overlap, eager": overlapped("eager"),
        "overlap, inductor": overlapped("inductor"),
    }


def measure(target: str, config: str, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each forward and backward of each variant; the variants take turns."""
    step = TARGETS[target](config, MeshSpec.of_world(1))
    functions = variants(step.module)
    steps_ms: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(-2, repeats):  # the first call compiles
        for name, function in functions.items():
            start_s = time.perf_counter()
            function(*step.example_inputs).backward()
            if i >= 0:
                steps_ms[name].append(1e3 * (time.perf_counter() - start_s))
    return steps_ms


def rows_of(target: str, steps_ms: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per variant. `ratio`: quartiles of a step over Inductor's of the same turn."""
    rows: list[dict[str, Any]] = []
    for name, taken_ms in steps_ms.items():
        ratios = np.array(taken_ms) / np.array(steps_ms[BASE])
        quartiles = [0.25, 0.5, 0.75]
        rows.append(
            {
                "model": target,
                "variant": name,
                "step_ms": [round(float(q), 1) for q in np.quantile(taken_ms, quartiles)],
                "ratio": [round(float(q), 3) for q in np.quantile(ratios, quartiles)],
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inner", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--config", default="debug", help="of the models")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    targets = list(TARGETS) if options.model == "all" else [options.model]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [
        row
        for target in targets
        for row in rows_of(target, measure(target, options.config, options.repeats))
    ]
    dist.destroy_process_group()
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"{'model':12} {'variant':18} {'ms: q1':>8} {'median':>7} {'q3':>7}   over inductor")
    for row in rows:
        q1, median, q3 = row["step_ms"]
        low, middle, high = row["ratio"]
        print(
            f"{row['model']:12} {row['variant']:18} {q1:8} {median:7} {q3:7}   "
            f"{middle:.3f} ({low:.3f}-{high:.3f})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
