"""How the time to schedule grows with the graph: 1k, 10k and 100k nodes; and what a whole
compilation of DeepSeek-V3 with 671B parameters takes.

    python -m benchmarks.scale [--json]

The graphs of the first are whole training steps of a DeepSeek-V3 style model, experts over 8 ranks,
the batch in slices, traced on a fake process group: tracing costs about 2 ms a node, minutes for
the largest. Costs are those of one CPU core and a 400 Mbit/s link; the memory cap is 1.05 of the
peak in program order.

Times are seconds: `capture_s` to trace the model, `extract_s` from the graph to costs and a
program, `seconds` to schedule it.

671B is one rank of 64 that share the experts, of fake tensors: 61 layers, forward and backward,
captured with symbolic sizes, sliced in two, scheduled and legalized in this process, its equal
layers traced once. `cpu_s` is what all of that takes of one core, `rss_mb` the most memory that the
process had until then.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.schedules import report
from models import DeepSeekV3, DeepSeekV3Config, LossModel
from overlap import cost, hardware, schedule, simulate
from overlap.config import Config
from overlap.report import compile_repeated
from overlap.simulate import Machine, Program
from tests.schedule_cases import fake_world

NUM_RANKS = 8
LINK_MBIT = 400.0
MEMORY_RATIO = 1.05
EXPERT_RANKS = 64
NUM_SLICES = 2
CASES = {"1k": (1, 2), "10k": (5, 4), "100k": (50, 4)}  # layers and slices


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


def rows() -> list[dict[str, Any]]:
    """One row per size: how long scheduling took, and what it was worth."""
    profile = hardware.with_link(hardware.load("cpu"), LINK_MBIT)
    machine = Machine.of(profile)
    result = [whole_model()]
    with fake_world(NUM_RANKS):
        for case, (num_layers, num_slices) in CASES.items():
            begin_s = time.perf_counter()
            gm = capture(num_layers, num_slices)
            captured_s = time.perf_counter()
            program = simulate.extract(gm, cost.estimate(gm, profile, lambda group: NUM_RANKS))
            times = {
                "capture_s": round(captured_s - begin_s, 1),
                "extract_s": round(time.perf_counter() - captured_s, 3),
            }
            result.append(_row(case, program, machine) | times)
    return result


def whole_model() -> dict[str, Any]:
    """The published model: what compiling all of it takes, and what its schedules are worth."""
    begin_s = time.process_time()
    with fake_world(EXPERT_RANKS):
        sizes = DeepSeekV3Config.v3_671b()
        with FakeTensorMode():
            model = LossModel(DeepSeekV3(sizes, dist.group.WORLD))
            tokens = torch.zeros(NUM_SLICES, sizes.max_seq, dtype=torch.int64)
        config = Config(slices=NUM_SLICES, hardware="h100")
        compiled = compile_repeated(model, (tokens, tokens.clone()), config)
    scheduled = [one.scheduled for one in compiled.graphs if one.scheduled]
    return {
        "case": "671B",
        "variant": "overlap",
        "num_nodes": sum(len(one.program) for one in scheduled),
        "cpu_s": round(time.process_time() - begin_s, 1),
        "rss_mb": peak_rss_mb(),
        "makespan_before": round(sum(one.schedule.before.makespan_us for one in scheduled), 1),
        "makespan": round(sum(one.schedule.after.makespan_us for one in scheduled), 1),
        "exposed": round(sum(one.schedule.after.exposed_us for one in scheduled), 1),
        "peak_bytes": max(one.schedule.after.peak_bytes for one in scheduled),
    }


def peak_rss_mb() -> int:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000  # in kB on Linux


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
    """Everything in seconds, but for the nodes and the memory."""
    result = Table(
        "case", "nodes", "capture", "extract", "schedule", "cpu", "rss MB", "step", "was"
    )
    columns = ("case", "num_nodes", "capture_s", "extract_s", "seconds", "cpu_s", "rss_mb")
    for row in rows:
        cells = [str(row.get(column, "")) for column in columns]
        steps = [f"{row[column] / 1e6:.2f}" for column in ("makespan", "makespan_before")]
        result.add_row(*cells, *steps)
    return result


if __name__ == "__main__":
    report(__doc__ or "", rows, table)
