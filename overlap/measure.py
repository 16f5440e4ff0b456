"""Measure what the calls of a target take, on the ranks of the job: `overlap hardware --measure`.

The target is compiled at each number of slices that the cost model chooses from. Then, for each:

    plain steps   the graphs as they run, one behind the other: how long each takes as a whole
    timed steps   the same graphs, node by node, each call timed by itself; a collective begins
                  when the last rank is there, and nothing runs beside it

A time is the lower quartile over the steps: a machine is disturbed one way only. A call's is
averaged over the nodes that make it, and that of the slowest rank: the others wait for it. Host
time to issue a call is part of it, as is freeing what dies with it.

How much communication slows compute beside it is measured by itself: products of small matrices,
alone and beside an all-to-all. Of every routed exchange the rows are noted, so that a schedule can
be chosen for another skew than that of the steps that were measured.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import operator
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from overlap import backend, collectives, compilation, cost, graph, pricing, target
from overlap.choose import CANDIDATE_SLICES
from overlap.collectives import Kind
from overlap.compilation import Compilation
from overlap.config import Config
from overlap.cost_table import SKEWS, Call, CostTable, Step
from overlap.errors import ConfigError
from overlap.runtime import detect, fake, groups, launch, link, link_group
from overlap.tables import Grid, ms
from overlap.target import MeshSpec

WARM_STEPS = 3
LATE_S = 2e-3  # longer than ranks leave a barrier apart, shorter than they come apart in training
CONTENTION_REPEATS, CONTENDING_BYTES, PRODUCT_SIZE = 9, 2**22, 128
QUANTILES = (50, 90, 99)
RANK_ENV = {"MKL_CBWR": "AVX512,STRICT"}  # as in the demo: the kernels are part of the place


@dataclasses.dataclass(frozen=True)
class MeasureOptions:
    """What is measured, and on which ranks.

    target, config: a training step by name, and which of its configurations.
    mesh: how the ranks are laid out.
    link_mbit: bandwidth of an emulated link between the ranks; None for plain gloo.
    steps: timed steps, and plain ones, of each number of slices.
    slices, axis: the numbers of slices to measure, and along what.
    """

    target: str
    config: str | None
    mesh: MeshSpec
    link_mbit: float | None = None
    steps: int = 9
    slices: tuple[int, ...] = (1, *CANDIDATE_SLICES)
    axis: str = "batch"

    def __post_init__(self) -> None:
        if self.link_mbit is not None:
            link.LinkConfig(self.link_mbit)
        Config(axis=self.axis)
        if self.steps < 1:
            raise ConfigError(f"steps is {self.steps!r}; expected at least 1")


def run(options: MeasureOptions) -> CostTable:
    """Start the ranks of `options.mesh` on this machine, and measure. Inside a job that torchrun
    started, this process is a rank already and measures as one.

    Raises ConfigError before anything is started, RankError, naming it, if a rank fails.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _on_rank(options)
    with fake.world(options.mesh.num_ranks):  # what does not fit is said here, and once
        target.make_step(options.target, options.config, options.mesh)
    launched = launch.LaunchOptions(num_ranks=options.mesh.num_ranks, env=RANK_ENV)
    return launch.launch(_on_rank, options, options=launched)[0]


def is_first_rank() -> bool:
    """Whether this process writes the table: not one of several that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def grid(table: CostTable) -> Grid:
    """What each number of slices takes, predicted from the table and measured beside it."""
    rows = [
        (
            program,
            str(slices),
            ms(step.predicted_us),
            ms(step.measured_us),
            f"{100 * (step.predicted_us / step.measured_us - 1):+.1f} %",
        )
        for program, steps in table.programs.items()
        for slices, step in sorted(steps.items())
    ]
    return Grid(("program", "slices", "predicted", "measured", "error"), tuple(rows), 1)


def summary(table: CostTable) -> dict[str, Any]:
    """The table without its calls, as plain data."""
    return {
        "sha256": table.digest,
        "place": dataclasses.asdict(table.place),
        "dims": dict(table.dims),
        "axis": table.axis,
        "contention": table.contention,
        "skew": {f"p{q}": _quantile(table.skews, q) for q in QUANTILES} if table.skews else None,
        "num_calls": len(table.calls),
        "programs": [
            {"program": program, "slices": slices, **dataclasses.asdict(step)}
            for program, steps in table.programs.items()
            for slices, step in sorted(steps.items())
        ],
    }


def skew_line(table: CostTable) -> str:
    """What the table saw of routing, in words."""
    if not table.skews:
        return "no routed exchange"
    quantiles = ", ".join(f"p{q} {_quantile(table.skews, q):.2f}" for q in QUANTILES)
    return f"busiest rank over its even share of routed rows: {quantiles}"


def _quantile(skews: Sequence[float], percent: int) -> float:
    return float(np.quantile(skews, percent / 100))


def _on_rank(options: MeasureOptions) -> CostTable:
    torch.set_num_threads(1)
    if options.link_mbit is not None:
        link_group.register(link.LinkConfig(options.link_mbit))
    dist.init_process_group("gloo" if options.link_mbit is None else link_group.EMULATED)

    def make_step(compile_module: Compile) -> Callable[[], None]:
        step = target.make_step(options.target, options.config, options.mesh)
        module = step.loss_module()
        return functools.partial(run_step, module, compile_module(module), step.example_inputs)

    try:
        return measure(make_step, Config(axis=options.axis), options.steps, options.slices)
    finally:
        dist.destroy_process_group()


def run_step(module: nn.Module, forward: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Forward, and backward if there is something to differentiate."""
    module.zero_grad()
    loss = forward(*inputs)
    if loss.requires_grad:
        loss.backward()


Compile = Callable[[nn.Module], Callable[..., Any]]


def measure(
    make_step: Callable[[Compile], Callable[[], Any]],
    config: Config,
    steps: int = MeasureOptions.steps,
    slices: Sequence[int] = MeasureOptions.slices,
) -> CostTable:
    """The cost table of a step, on a rank of a job; all ranks call it and get the same table.

    make_step: builds the step anew: gets what stands for torch.compile, and returns a function
        that runs forward and backward once.
    config: the options that the step will run with; `slices`, `costs` and `inner` are set here, and
        an axis that is "auto" is the batch, for a table is of one.

    Raises ConfigError for a step without a collective, and for one on a device other than the CPU.
    """
    found: list[_Measured] = []
    axis = "batch" if config.axis == "auto" else config.axis
    for num_slices in slices:
        torch.compiler.reset()
        own = dataclasses.replace(config, slices=num_slices, axis=axis, costs=None, inner="eager")
        found += _measure_slices(make_step, own, steps)
    calls = _over_ranks(itertools.chain.from_iterable(one.calls() for one in found))
    dims: dict[int, int] = {}
    for one in found:
        dims |= one.dims()
    table = CostTable(
        place=detect.place(torch.device("cpu")),
        dims=dims,
        axis=axis,
        skews=_skews([pair for one in found for pair in one.routed_rows()]),
        contention=_contention(),
        programs={},
        calls=calls,
    )
    table = dataclasses.replace(table, programs=_programs(found, table))
    shared: list[Any] = [table]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def _measure_slices(
    make_step: Callable[[Compile], Callable[[], Any]], config: Config, steps: int
) -> list[_Measured]:
    """Compile and run the step with `config`; what was seen of each of its programs."""
    stopwatch = Stopwatch()
    num_known = len(compilation.records())
    compiler = functools.partial(backend.compile_with, config, stopwatch.runner)
    step = make_step(lambda module: torch.compile(module, backend=compiler))
    for _ in range(WARM_STEPS):
        step()
    gc.collect()
    gc.freeze()
    stopwatch.is_on = True
    for _ in range(steps):  # in turn: a disturbance slows both kinds
        for is_timed in (False, True):
            stopwatch.is_timed = is_timed
            dist.barrier()
            step()
    gc.unfreeze()
    records = [
        record
        for record in compilation.records()[num_known:]
        if any(g.local for g in record.graphs)
    ]
    if not records:
        raise ConfigError("the step has no collective, so there is nothing to measure costs for")
    return [_Measured(record, stopwatch.seen) for record in records]


# ---- timing a graph -----------------------------------------------------------------------------


@dataclasses.dataclass
class Seen:
    """What was seen of one graph, in microseconds: whole runs, and by name each node's runs: the
    call, and of a collective the time from its start to its end, without the two calls. rows: of a
    routed exchange, how many rows this rank sent and received."""

    spans_us: list[float] = dataclasses.field(default_factory=list[float])
    calls_us: dict[str, list[float]] = dataclasses.field(default_factory=dict[str, list[float]])
    links_us: dict[str, list[float]] = dataclasses.field(default_factory=dict[str, list[float]])
    rows: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict[str, tuple[int, int]])


class Stopwatch:
    """Runs graphs as they are, or, while `is_timed`, node by node; notes times while `is_on`."""

    def __init__(self) -> None:
        self.is_on = self.is_timed = False
        self.seen: dict[fx.GraphModule, Seen] = {}

    def runner(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """A callable of `gm`, as the backend wants it."""
        seen = self.seen[gm] = Seen()
        run = backend.boxed_callable(gm)
        timed = TimedGraph(gm, seen)

        def run_one(inputs: list[Any]) -> Any:
            if not self.is_on:
                return run(inputs)
            if self.is_timed:
                return timed.run(inputs)
            began = time.perf_counter()
            result = run(inputs)
            seen.spans_us.append((time.perf_counter() - began) * 1e6)
            return result

        return backend.boxed(run_one)


class TimedGraph:
    """A graph that runs node by node, in order, with a clock beside each of them.

    A collective is waited for where it starts, after a barrier of its group, so that it is timed
    alone, and so is what runs between its start and its wait. The last rank of the group starts it
    `LATE_S` after the others, for ranks are never there together in training, and a collective may
    take longer then: gloo's all-to-all twice as long. Its time is from that last start.
    """

    def __init__(self, gm: fx.GraphModule, seen: Seen) -> None:
        self._gm = gm
        self._seen = seen
        self._dead = _last_uses(gm.graph)

    def run(self, inputs: list[Any]) -> Any:
        """The graph's result; empties `inputs`."""
        values = dict(zip(graph.placeholders(self._gm.graph), inputs, strict=True))
        inputs.clear()
        for node in self._gm.graph.nodes:
            match node.op:
                case "placeholder":
                    pass
                case "get_attr":
                    values[node] = operator.attrgetter(node.target)(self._gm)
                case "output":
                    return fx.map_arg(node.args[0], values.__getitem__)
                case _:
                    self._call(node, values)
        raise AssertionError("a graph without an output")

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> None:
        args: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        alone = collectives.waits_of(node) if _is_timed_alone(node) else []
        waits: list[Any] = [wait.target for wait in alone]
        ahead_s = 0.0
        if waits:
            group = groups.resolve(collectives.group_of(node))
            dist.barrier(group)
            if group.rank() == group.size() - 1:
                _pause(LATE_S)
            else:
                ahead_s = LATE_S
        began = time.perf_counter()
        values[node] = target(*args, **kwargs)
        issued = time.perf_counter()
        for wait in waits:
            wait(values[node])
        arrived = time.perf_counter()
        if _is_routed(node):
            self._seen.rows[node.name] = len(args[0]), len(values[node])
        del args, kwargs
        dying = time.perf_counter()
        for dead in self._dead.get(node, ()):
            del values[dead]
        call_s = issued - began + time.perf_counter() - dying
        self._seen.calls_us.setdefault(node.name, []).append(call_s * 1e6)
        if waits:
            took_us = max(0.0, arrived - issued - ahead_s) * 1e6
            self._seen.links_us.setdefault(node.name, []).append(took_us)


def _pause(seconds: float) -> None:
    """To the microsecond: a sleep alone ends late."""
    end = time.perf_counter() + seconds
    time.sleep(seconds / 2)
    while time.perf_counter() < end:
        pass


def _is_timed_alone(node: fx.Node) -> bool:
    """Whether all ranks of a group can wait for a collective where it starts. A peer that is sent
    to may be waiting for something else."""
    return collectives.is_start(node) and collectives.kind_of(node) is not Kind.P2P


def _is_routed(node: fx.Node) -> bool:
    """Whether a node is an all-to-all whose splits come from data."""
    if not collectives.is_start(node) or collectives.kind_of(node) is not Kind.ALL_TO_ALL:
        return False
    return isinstance(node.args[1], list | tuple) and any(
        isinstance(size, fx.Node) for size in node.args[1]
    )


def _last_uses(body: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, what dies with it: values it uses last, and its own if nobody reads it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in body.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    dead: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if node.op in ("call_function", "call_method", "call_module"):
            dead.setdefault(node, []).append(value)
    return dead


# ---- from times to a table ----------------------------------------------------------------------


class _Measured:
    """One program in one number of slices, as this rank saw it."""

    def __init__(self, record: Compilation, seen: Mapping[fx.GraphModule, Seen]) -> None:
        self.record = record
        self._graphs = [(one.gm, seen[one.gm]) for one in record.graphs]

    def measured_us(self) -> float:
        """All graphs of the program, one behind the other."""
        runs = zip(*(seen.spans_us for _, seen in self._graphs), strict=True)
        return lower_quartile(list(map(sum, runs)))

    def predicted_us(self, table: CostTable, skew: float) -> float:
        played = [self.record.play(gm, groups.size_of, table, skew) for gm, _ in self._graphs]
        return sum(timeline.makespan_us for timeline in played)

    def calls(self) -> Iterator[tuple[str, Call]]:
        """What each node does, and what it takes."""
        sizes = self.record.local_sizes
        assert sizes is not None
        for gm, seen in self._graphs:
            for node in gm.graph.nodes:
                name = pricing.call_of(node, groups.size_of, sizes)
                is_start = collectives.is_start(node)
                if name and not (is_start and node.name not in seen.links_us):
                    yield name, _call_of_node(node, seen, sizes)

    def routed_rows(self) -> list[tuple[int, int]]:
        return [rows for _, seen in self._graphs for rows in seen.rows.values()]

    def dims(self) -> dict[int, int]:
        """The sizes that graph inputs had, by dimension, where they are symbolic."""
        found: dict[int, int] = {}
        for gm, _ in self._graphs:
            for node in graph.placeholders(gm.graph):
                for tensor in graph.tensors_of(graph.fake_value(node)):
                    for size in tensor.shape:
                        found |= _dims_of(size)
        return found


def _dims_of(size: int | torch.SymInt) -> dict[int, int]:
    found: dict[int, int] = {}
    if isinstance(size, int):
        return found
    for symbol in sorted(size.node.expr.free_symbols, key=str):
        dim, hint = cost.input_dim_of(symbol, size), cost.hint_of(symbol, size)
        if dim is not None and hint is not None:
            found[dim] = hint
    return found


def lower_quartile(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def _call_of_node(node: fx.Node, seen: Seen, sizes: cost.Sizes) -> Call:
    calls_us = seen.calls_us[node.name]
    host_us, least_us = lower_quartile(calls_us), min(calls_us)
    if collectives.is_wait(node):
        return Call(host_us, least_us, 1, issue_us=host_us)
    if not collectives.is_start(node):
        work = cost.work_of(node, sizes)
        return Call(host_us, least_us, 1, work.flops, work.num_bytes)
    links_us = seen.links_us[node.name]
    num_ranks = groups.size_of(collectives.group_of(node))
    return Call(
        us=lower_quartile(links_us),
        min_us=min(links_us),
        num_calls=1,
        num_bytes=cost.volume_of(node, num_ranks, sizes),
        issue_us=host_us,
    )


def _over_ranks(found: Iterable[tuple[str, Call]]) -> dict[str, Call]:
    """Equal calls as one: averaged over the nodes of a rank, then that of the rank that counts."""
    by_name: dict[str, list[Call]] = {}
    for name, call in found:
        by_name.setdefault(name, []).append(call)
    own = {name: _mean(calls) for name, calls in by_name.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: _decisive([rank[name] for rank in ranks if name in rank]) for name in names}


def _mean(calls: Sequence[Call]) -> Call:
    return dataclasses.replace(
        calls[0],
        us=statistics.fmean(call.us for call in calls),
        min_us=statistics.fmean(call.min_us for call in calls),
        issue_us=statistics.fmean(call.issue_us for call in calls),
        num_calls=len(calls),
    )


def _decisive(ranks: Sequence[Call]) -> Call:
    """Of one call on several ranks: the slowest, which the others wait for."""
    return dataclasses.replace(
        ranks[0],
        us=max(call.us for call in ranks),
        min_us=min(call.min_us for call in ranks),
        issue_us=max(call.issue_us for call in ranks),
    )


def _skews(routed_rows: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """Of each exchange, the rows of its busiest rank over the even share, ascending. `routed_rows`
    are those that this rank sent and received."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, routed_rows)
    skews: list[float] = []
    for exchange in zip(*ranks, strict=True):
        share = sum(sent for sent, _ in exchange) / len(exchange)
        if share:
            skews.append(max(map(max, exchange)) / share)
    return tuple(sorted(skews))


def _contention() -> float:
    """How much longer compute takes beside an all-to-all of all ranks, as a part of its time alone:
    that of the rank it is most for."""
    sent = torch.ones(dist.get_world_size(), CONTENDING_BYTES // 4 // dist.get_world_size())
    received = torch.empty_like(sent)
    a, b, result = (torch.ones(PRODUCT_SIZE, PRODUCT_SIZE) for _ in range(3))

    def multiply() -> float:
        began = time.perf_counter()
        torch.mm(a, b, out=result)
        return (time.perf_counter() - began) * 1e6

    beside_us: list[float] = []
    alone_us: list[float] = []
    for _ in range(CONTENTION_REPEATS):
        dist.barrier()
        work: Any = dist.all_to_all_single(received, sent, async_op=True)
        seen = [multiply()]
        while not work.is_completed():
            seen.append(multiply())
        work.wait()
        beside_us.append(statistics.fmean(seen))
        alone_us.append(statistics.fmean(multiply() for _ in seen))
    own = torch.tensor(lower_quartile(beside_us) / lower_quartile(alone_us) - 1)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return max(0.0, own.item())


def _programs(found: Sequence[_Measured], table: CostTable) -> dict[str, dict[int, Step]]:
    """What each program takes in each number of slices, on the slowest rank. All ranks have the
    same programs in the same order, though the names may differ with what a rank holds."""
    own = [
        (
            one.record.program,
            one.record.slices,
            tuple(one.predicted_us(table, skew) for skew in SKEWS),
            one.measured_us(),
        )
        for one in found
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    programs: dict[str, dict[int, Step]] = {}
    for same in zip(*ranks, strict=True):
        slowest_us = map(max, zip(*(us for _, _, us, _ in same), strict=True))
        # More rows never take less: a call may be scaled from another one than at the skew before.
        skewed_us = tuple(itertools.accumulate(slowest_us, max))
        step = Step(skewed_us[0], max(us for _, _, _, us in same), skewed_us)
        for program, slices, _, _ in same:
            programs.setdefault(program, {})[slices] = step
    return programs
