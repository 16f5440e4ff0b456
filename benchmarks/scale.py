"""How the time to schedule grows with the graph: 1k, 10k and 100k nodes.

    python -m benchmarks.scale [--json]

The graphs are whole training steps of a DeepSeek-V3 style model, experts over 8 ranks, the batch
in slices, traced on a fake process group. Tracing costs about 2 ms a node, far more than
scheduling, so the largest is the middle one ten times, each copy behind the one before, as ten
times the layers would be. Costs are those of one CPU core and a 400 Mbit/s link; the memory cap is
1.05 of the peak in program order.

Times are seconds: `extract_s` from the graph to costs and a program, `seconds` to schedule it.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.schedules import report
from models import DeepSeekV3, DeepSeekV3Config, LossModel
from overlap import cost, hardware, schedule, simulate
from overlap.simulate import Machine, Program, Storage
from tests.schedule_cases import fake_world

NUM_RANKS = 8
LINK_MBIT = 400.0
MEMORY_RATIO = 1.05


def capture(num_layers: int, num_slices: int) -> fx.GraphModule:
    """A training step, forward to gradients, with the batch in slices. Needs a process group."""
    config = dataclasses.replace(DeepSeekV3Config.debug(), num_layers=num_layers, num_dense=0)
    moe = dataclasses.replace(config.moe, num_experts=2 * NUM_RANKS)
    config = dataclasses.replace(config, moe=moe)
    model = LossModel(DeepSeekV3(config, dist.group.WORLD))

    def step(
        parameters: dict[str, Tensor],
        buffers: dict[str, Tensor],
        tokens: list[Tensor],
        labels: list[Tensor],
    ) -> tuple[Tensor, ...]:
        losses = [
            torch.func.functional_call(model, (parameters, buffers), batch)
            for batch in zip(tokens, labels, strict=True)
        ]
        loss = torch.stack(losses).mean()
        return loss, *torch.autograd.grad(loss, list(parameters.values()))

    parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    tokens = [torch.zeros(4, config.max_seq, dtype=torch.int64) for _ in range(num_slices)]
    trace = make_fx(step, tracing_mode="fake")
    return trace(parameters, dict(model.named_buffers()), tokens, tokens)


def repeat(program: Program, num_times: int) -> Program:
    """`program` several times in a row, each copy behind all of the one before."""
    size = len(program)
    offsets = [i * size for i in range(num_times)]
    first = [()] + [(offset - 1,) for offset in offsets[1:]]
    return dataclasses.replace(
        program,
        names=tuple(f"{name}_{i}" for i in range(num_times) for name in program.names),
        kinds=program.kinds * num_times,
        durations=program.durations * num_times,
        groups=program.groups * num_times,
        starts=tuple(s + o if s >= 0 else -1 for o in offsets for s in program.starts),
        deps=tuple(
            tuple(dep + offset for dep in deps) or before
            for offset, before in zip(offsets, first, strict=True)
            for deps in program.deps
        ),
        storages=tuple(_shifted(s, offset) for offset in offsets for s in program.storages),
    )


def _shifted(storage: Storage, offset: int) -> Storage:
    return dataclasses.replace(
        storage,
        definer=storage.definer + offset,
        uses=tuple(use + offset for use in storage.uses),
    )


def rows() -> list[dict[str, Any]]:
    """One row per size: how long scheduling took, and what it was worth."""
    profile = hardware.with_link(hardware.load("cpu"), LINK_MBIT)
    machine = Machine.of(profile)
    result: list[dict[str, Any]] = []
    program = None
    with fake_world(NUM_RANKS):
        for case, (num_layers, num_slices) in {"1k": (1, 2), "10k": (5, 4)}.items():
            gm = capture(num_layers, num_slices)
            begin_s = time.perf_counter()
            costs = cost.estimate(gm, profile, lambda group: NUM_RANKS)
            program = simulate.extract(gm, costs)
            extract_s = time.perf_counter() - begin_s
            result.append(_row(case, program, machine) | {"extract_s": round(extract_s, 3)})
    assert program is not None
    result.append(_row("100k, ten times the middle one", repeat(program, 10), machine))
    return result


def _row(case: str, program: Program, machine: Machine) -> dict[str, Any]:
    peak_bytes, _ = simulate.peak_memory(program, range(len(program)))
    begin_s = time.perf_counter()
    result = schedule.schedule(program, machine, int(peak_bytes * MEMORY_RATIO))
    seconds = time.perf_counter() - begin_s
    return {
        "case": case,
        "variant": "overlap",
        "num_nodes": len(program),
        "seconds": round(seconds, 3),
        "makespan_before": round(result.before.makespan_us, 1),
        "makespan": round(result.after.makespan_us, 1),
        "exposed": round(result.after.exposed_us, 1),
        "peak_bytes": result.after.peak_bytes,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table("case", "nodes", "extract s", "schedule s", "step us before", "after")
    for row in rows:
        columns = ("case", "num_nodes", "extract_s", "seconds", "makespan_before", "makespan")
        result.add_row(*(str(row.get(column, "")) for column in columns))
    return result


if __name__ == "__main__":
    report(__doc__ or "", rows, table)
