"""The compiler beside its peers: the same programs, costs, simulator and link for all of them.

    python -m benchmarks.peers [--json] [--link 400]              simulated
    python -m benchmarks.peers [--json] [--link 400] --measure    and timed, as root, over that link

    as written              un-sliced, every collective waited for where it starts
    overlap, N              N slices, our order
    torch, N                our N slices (it makes none), ordered by torch's overlap scheduler
    TorchTitan eager, M     two chunks of every module M, in the order of its EP overlap passes
    TorchTitan graph        its other strategy, which does not run on torch 2.13

An MoE step of ours or torch's is a forward and a backward graph, TorchTitan's is one graph: what
is in flight may cross the boundary there. Makespan and exposed communication are sums over the
graphs, the peak is the higher one's. `seconds` is what all passes together took, without tracing.

The rows on FSDP are whole steps of a Llama-style model whose weights are gathered where they are
used; nothing is sliced. Ours keeps to the default memory budget, over the peak as written; torch's
limits are out of the way.

Timed steps, slower rank's: all variants take turns in one run. Ours and torch's go through
torch.compile, TorchTitan's graph is called as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from benchmarks import handwritten, peers_soundness, peers_titan, peers_torch, slicing
from benchmarks.netns import LinkUnavailable, shaped_link
from models import DeepSeekV3, DeepSeekV3Config, Llama, LlamaConfig, LossModel
from overlap import backend, compilation, cost, hardware, report, schedule, simulate
from overlap.config import Config
from overlap.hardware import Profile
from overlap.passes.schedule import Scheduled
from overlap.runtime import fake, groups
from overlap.simulate import Machine, Timeline

WRITTEN = "as written"
SLICES = (1, 2, 4)
FSDP_RANKS = 8
FSDP_LOADS = (0.4, 0.8, 1.2)
Batch = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: `make(rank, world)` gives the module that returns a loss, and a rank's batch.

    roots: what TorchTitan may chunk in it.
    """

    name: str
    make: Callable[[int, int], tuple[nn.Module, Batch]]
    roots: tuple[str, ...]


def _moe_transformer(rank: int, world: int) -> tuple[nn.Module, Batch]:
    shape = handwritten.Shape()
    model = slicing.CompiledModel(handwritten.make_model(shape, rank, world))
    return model, handwritten.make_batch(shape, rank)


def _deepseek(config: DeepSeekV3Config, rank: int) -> tuple[nn.Module, Batch]:
    model = LossModel(DeepSeekV3(config, dist.group.WORLD))
    generator = torch.Generator().manual_seed(1 + rank)
    size = (8, config.max_seq + 1)
    tokens = torch.randint(config.vocab_size, size, generator=generator)
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


TOY = Case(
    "DeepSeek-V3, toy",
    lambda rank, world: _deepseek(DeepSeekV3Config.toy(), rank),
    (peers_titan.BLOCK, peers_titan.MOE),
)
CASES = (
    Case("2-layer MoE transformer", _moe_transformer, (peers_titan.BLOCK,)),
    Case(
        "DeepSeek-V3, 3 layers",
        lambda rank, world: _deepseek(DeepSeekV3Config.debug(), rank),
        (peers_titan.BLOCK, peers_titan.MOE),
    ),
)


# ---- simulated ----------------------------------------------------------------------------------


def moe_rows(case: Case, link_mbit: float, slices: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The case's rows, for rank 0 of two."""
    with tempfile.TemporaryDirectory() as folder, fake.world(2):
        path = slicing.profile_file(Path(folder), link_mbit)
        for n in slices:
            yield from _compiled_rows(case, Config(slices=n, hardware=path))
        if reason := peers_titan.why_left_out():
            yield _row(case.name, "TorchTitan", 2, []) | {"note": f"left out: {reason}"}
            return
        for root in case.roots:
            yield _titan_row(case, root, hardware.load(path))
        yield _graph_strategy_row(case)


def _compiled_rows(case: Case, config: Config) -> Iterator[dict[str, Any]]:
    """Ours and torch's order of the program in so many slices."""
    slices = int(config.slices)
    scheduled, seconds = _compile(case, config)
    if slices == 1:
        written = [one.schedule.before for one in scheduled]
        yield _row(case.name, WRITTEN, 1, written)
    ours = [one.schedule.after for one in scheduled]
    yield _row(case.name, f"overlap, N={slices}", slices, ours, seconds)
    with peers_torch.in_place_of_ours():
        scheduled, seconds = _compile(case, config)
    theirs = [one.schedule.after for one in scheduled]
    yield _row(case.name, f"torch, N={slices}", slices, theirs, seconds)


def _compile(case: Case, config: Config) -> tuple[list[Scheduled], float]:
    """What was decided for each graph that runs, and the time of all passes."""
    module, batch = case.make(0, 2)
    record = report.compile_only(module, batch, config)
    scheduled = [graph.scheduled for graph in record.graphs if graph.scheduled]
    return scheduled, sum(run.run_us for run in record.runs) / 1e6


def _titan_row(case: Case, root: str, profile: Profile) -> dict[str, Any]:
    step = peers_titan.trace(*case.make(0, 2), root)
    program = simulate.extract(step.gm, cost.estimate(step.gm, profile, groups.size_of))
    timeline = simulate.simulate(program, range(len(program)), Machine.of(profile))
    return _row(case.name, _titan_name(root), 2, [timeline], step.seconds)


def _titan_name(root: str) -> str:
    return f"TorchTitan eager, {'MoE' if root == peers_titan.MOE else 'blocks'}"


def _graph_strategy_row(case: Case) -> dict[str, Any]:
    """How far TorchTitan's strategy `graph` comes: its error, in `note`."""
    try:
        peers_titan.trace(*case.make(0, 2), case.roots[-1], "graph")
    except Exception as error:  # whatever it raises is the result
        note = f"{type(error).__name__}: {error}".partition("\n")[0][:60]
    else:
        note = "traced: this torch runs it, so it wants rows of its own"
    return _row(case.name, "TorchTitan graph", 2, []) | {"note": note}


def fsdp_rows(config: LlamaConfig, loads: Sequence[float] = FSDP_LOADS) -> Iterator[dict[str, Any]]:
    """Rows of a Llama step on FSDP_RANKS ranks whose communication takes `loads` of its compute."""
    with fake.world(FSDP_RANKS):
        gm = fsdp_step(config)
        for load in loads:
            profile = _with_load(gm, load)
            yield from _fsdp_rows(f"FSDP Llama, load {load:g}", fsdp_step(config), profile)


def _fsdp_rows(case: str, gm: fx.GraphModule, profile: Profile) -> Iterator[dict[str, Any]]:
    machine = Machine.of(profile)
    program = simulate.extract(gm, cost.estimate(gm, profile, groups.size_of))
    budget = Config().memory_budget
    assert isinstance(budget, float)
    cap_bytes = int(budget * simulate.peak_memory(program, range(len(program)))[0])
    began = time.perf_counter()
    ours = schedule.schedule(program, machine, cap_bytes)
    seconds = time.perf_counter() - began
    yield _row(case, WRITTEN, 1, [ours.before])
    yield _row(case, "overlap, N=1", 1, [ours.after], seconds)
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    began = time.perf_counter()
    peers_torch.reorder(
        gm, lambda node: peers_torch.node_us(program, position[node], machine) / 1e3
    )
    seconds = time.perf_counter() - began
    order = [position[node] for node in gm.graph.nodes]
    theirs = simulate.simulate(program, order, machine)
    yield _row(case, "torch, N=1", 1, [theirs], seconds)
    bound = schedule.lower_bound_us(program, machine)
    yield {"case": case, "variant": "bound", "slices": 1, "makespan": round(bound, 1)}


class _Gather(nn.Module):
    """A weight from this rank's rows of it."""

    def forward(self, shard: Tensor) -> Tensor:
        return funcol.all_gather_single(shard, 0, dist.group.WORLD)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.chunk(FSDP_RANKS)[0].clone()


def fsdp_step(config: LlamaConfig) -> fx.GraphModule:
    """A training step, forward to gradients, whose weights are gathered where they are used."""
    model = LossModel(Llama(config))
    for module in list(model.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            parametrize.register_parametrization(module, name, _Gather(), unsafe=True)

    def step(
        parameters: dict[str, Tensor], buffers: dict[str, Tensor], tokens: Tensor
    ) -> tuple[Tensor, ...]:
        loss = torch.func.functional_call(model, (parameters, buffers), (tokens, tokens))
        return loss, *torch.autograd.grad(loss, list(parameters.values()))

    parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    tokens = torch.zeros(8, config.max_seq, dtype=torch.int64)
    return make_fx(step, tracing_mode="fake")(parameters, dict(model.named_buffers()), tokens)


def _with_load(gm: fx.GraphModule, load: float) -> Profile:
    """A CPU with the link on which communication takes `load` times as long as compute."""
    profile = dataclasses.replace(hardware.load("cpu"), latency_us=0.0)

    def loads_us(mbit: float) -> tuple[float, float]:
        costs = cost.estimate(gm, hardware.with_link(profile, mbit), groups.size_of)
        nodes = [costs.of(node) for node in gm.graph.nodes]
        return sum(c.compute_us for c in nodes), sum(c.collective_us for c in nodes)

    compute_us, comm_us = loads_us(1.0)
    return hardware.with_link(profile, comm_us / (load * compute_us))


def _row(
    case: str,
    variant: str,
    slices: int,
    timelines: Sequence[Timeline],
    seconds: float | None = None,
) -> dict[str, Any]:
    """Times in microseconds; None where there is nothing to say."""
    makespan = round(sum(t.makespan_us for t in timelines), 1) if timelines else None
    exposed = round(sum(t.exposed_us for t in timelines), 1) if timelines else None
    return {
        "case": case,
        "variant": variant,
        "slices": slices,
        "makespan": makespan,
        "exposed": exposed,
        "peak_bytes": max((t.peak_bytes for t in timelines), default=None),
        "seconds": None if seconds is None else round(seconds, 2),
        "step_ms": None,
    }


# ---- measured -----------------------------------------------------------------------------------


def measure(case_name: str, link_mbit: float, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each step of each variant of a case of CASES, the slower rank's."""
    dist.init_process_group("gloo")
    case = next(case for case in CASES if case.name == case_name)
    batch = case.make(dist.get_rank(), dist.get_world_size())[1]
    with tempfile.TemporaryDirectory() as folder:
        path = slicing.profile_file(Path(folder), link_mbit)
        steps = make_steps(case, batch, path)
    steps_ms = slicing.take_turns(steps, batch, repeats)
    dist.barrier()
    dist.destroy_process_group()
    return steps_ms


def make_steps(
    case: Case, batch: Batch, hardware_path: str, slices: Sequence[int] = SLICES
) -> dict[str, Callable[..., Tensor]]:
    """By variant, forward and backward on `batch`, compiled; each leaves the gradients in
    parameters of its own, which have the same values, and returns the loss."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def compiled(options: dict[str, Any]) -> Callable[..., Tensor]:
        module, _ = case.make(rank, world)
        num_known = len(compilation.records())

        def own_backend(gm: fx.GraphModule, inputs: Any) -> Any:
            # One of each step's own: Dynamo takes equal backends' code for equal modules.
            return backend.overlap(gm, inputs, options)

        step = _step_of(module, torch.compile(module, backend=own_backend, fullgraph=True))
        step(*batch)
        assert len(compilation.records()) > num_known, "the step runs another one's code"
        return step

    module, _ = case.make(rank, world)
    steps: dict[str, Callable[..., Tensor]] = {WRITTEN: _step_of(module, module)}
    for n in slices:
        options = {"slices": n, "hardware": hardware_path}
        steps[f"overlap, N={n}"] = compiled(options)
        with peers_torch.in_place_of_ours():
            steps[f"torch, N={n}"] = compiled(options)
    for root in () if peers_titan.why_left_out() else case.roots:
        module, _ = case.make(rank, world)
        steps[_titan_name(root)] = peers_titan.trace(module, batch, root).run
    return steps


def _step_of(module: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def step(*batch: Tensor) -> Tensor:
        module.zero_grad()
        loss = forward(*batch)
        loss.backward()
        return loss.detach()

    return step


def _add_steps(rows: list[dict[str, Any]], link_mbit: float, repeats: int) -> None:
    """Fill in `step_ms` of the cases' rows. Raises LinkUnavailable."""
    for case in CASES:
        with shaped_link(link_mbit) as link:
            arguments = (case.name, link_mbit, repeats)
            steps_ms = link.run(measure, *arguments, env=slicing.RANK_ENV)[0]
        for row in rows:
            if row["case"] == case.name and row["variant"] in steps_ms:
                row["step_ms"] = handwritten.quartiles(steps_ms[row["variant"]])


# ---- shown --------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Makespan, exposed communication, peak, time of the passes and measured steps."""
    columns = ("variant", "makespan ms", "exposed ms", "peak MB", "passes s", "step ms", "speed-up")
    result = Table("case", *columns, title="peers: simulated, and a measured step's lower quartile")
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        for row in own:
            result.add_row(case if row is own[0] else "", row["variant"], *_cells(row, own[0]))
    return result


def _cells(row: dict[str, Any], written: dict[str, Any]) -> list[str]:
    """What follows the variant; `speed-up` is over the program as written, measured if it was."""
    if row.get("note"):
        return [row["note"]]
    step_ms = row.get("step_ms")
    now, before = row["makespan"], written["makespan"]
    if step_ms and written["step_ms"]:
        now, before = step_ms["q1"], written["step_ms"]["q1"]
    return [
        _number(row["makespan"], 1e3, 1),
        _number(row.get("exposed"), 1e3, 1),
        _number(row.get("peak_bytes"), 1e6, 1),
        _number(row.get("seconds"), 1, 2),
        _number(step_ms["q1"], 1, 1) if step_ms else "-",
        f"{before / now:.2f}x",
    ]


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def soundness_table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table("soundness", "programs", "accepted", "wrong", title="accepted programs")
    for row in rows:
        counts = (row["programs"], row["accepted"], len(row["wrong"]))
        result.add_row(row["variant"], *map(str, counts))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--link", type=float, default=400, metavar="MBIT", help="bandwidth")
    parser.add_argument("--measure", action="store_true", help="time the steps too; needs root")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options = parser.parse_args(argv)
    rows = [row for case in CASES for row in moe_rows(case, options.link, SLICES)]
    if options.measure:
        try:
            _add_steps(rows, options.link, options.repeats)
        except LinkUnavailable as error:
            parser.exit(1, f"{error}\n")
    rows += fsdp_rows(LlamaConfig.debug())
    accepted = peers_soundness.rows()
    if options.json:
        print(json.dumps(rows + accepted))
    else:
        Console().print(table(rows), soundness_table(accepted), sep="\n")
    if reason := peers_titan.why_left_out():
        print(f"TorchTitan is left out: {reason}; {peers_titan.INSTALL}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    from benchmarks import peers  # by its name, which the ranks can import

    raise SystemExit(peers.main())
