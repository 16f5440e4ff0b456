"""A random program as plain data; tracing, slicing and running it; comparing it with itself.

Dense programs run on values of [B, S, D], cut along the batch. Routed ones are a layer with one
all-to-all of counts and two of rows, cut along the batch, tokens or experts. B is symbolic.

Accepted: at least one collective runs once per slice. Then outputs and all gradients, of inputs and
parameters on every rank, have to be those of the program as written, under a loss that weighs every
element differently; bitwise where exact numerics accepted it. Refused: the graph is as it was.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import sympy
import torch
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource, LocalSource, UnspecializedNNModuleSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from overlap import graph, slicing
from overlap import placement as pl
from overlap.certificate import NONE
from overlap.errors import PassError
from overlap.instantiate import instantiate
from overlap.passes.functionalize import functionalize
from overlap.passes.slice import ANALYSES
from overlap.runtime import fake
from tests.fuzz import dense, lockstep, routes

S, D, P = 4, 8, 256
TOLERANCE = 1e-8  # of float64, whose values here are about 1
TOLERANCE_BF16 = (
    2e-2  # where products are of bf16, and the weight gradient of each slice is rounded
)


@dataclasses.dataclass(frozen=True)
class Program:
    """kind: "dense" or "routed". steps: by name, with the number that varies each.
    axis, slices, is_exact: how it is sliced. batches: rows of every rank; a dense program's ranks
    have equal ones. is_trimmed: as the batch is analysed for training; else every node is sliced
    that can be."""

    kind: str
    steps: tuple[tuple[str, int], ...]
    axis: str
    slices: int
    batches: tuple[int, ...]
    is_exact: bool = False
    is_trimmed: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        fields = json.loads(text)
        steps = tuple((name, k) for name, k in fields.pop("steps"))
        return Program(**fields | {"steps": steps, "batches": tuple(fields["batches"])})


class NoProgram(Exception):
    """Steps that do not fit together: as written, it does not trace or run."""


class Different(AssertionError):
    """The sliced program computes something else."""


@dataclasses.dataclass
class Outcome:
    """is_accepted: something is sliced; why_not: the first reason if not. rules: those that decided
    a node that slices compute. asked: those that were asked for any node."""

    is_accepted: bool
    why_not: str = ""
    rules: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    asked: set[str] = dataclasses.field(default_factory=set[str])


# ---- random programs -----------------------------------------------------------------------------

_K = st.integers(0, 179)
_EXCHANGE = st.tuples(st.just("exchanged"), st.integers(0, 7))
_ANY = st.tuples(st.sampled_from([name for name in dense.STEPS if name != "exchanged"]), _K)


def _dense() -> st.SearchStrategy[Program]:
    steps = st.tuples(st.lists(_ANY, max_size=3), _EXCHANGE, st.lists(_ANY, min_size=1, max_size=5))
    return st.builds(
        lambda parts, last, slices, rows, exact, trimmed: Program(
            "dense",
            (*parts[0], parts[1], *parts[2], *last),
            "batch",
            slices,
            (rows,) * dense.NUM_RANKS,
            exact,
            trimmed,
        ),
        steps,
        st.lists(_EXCHANGE, max_size=1),
        st.integers(2, 4),
        st.integers(2, 7),
        st.sampled_from([False] * 7 + [True]),
        st.booleans(),
    )


def _routed() -> st.SearchStrategy[Program]:
    base = st.tuples(st.just("base"), st.integers(0, len(routes.BASES) - 1))
    swap = st.tuples(st.just("swap"), st.integers(0, len(routes.SWAPS) - 1))
    around = st.tuples(st.sampled_from(["unary", "arithmetic", "binary", "normed"]), _K)
    return st.builds(
        lambda base, swaps, before, axis, slices, batches, exact: Program(
            "routed", (base, *swaps, *before), axis, slices, batches, exact
        ),
        base,
        st.lists(swap, max_size=2),
        st.lists(around, max_size=2),
        st.sampled_from(list(ANALYSES)),
        st.integers(2, 4),
        st.tuples(*[st.integers(0, 5)] * dense.NUM_RANKS),
        st.sampled_from([False, False, False, True]),
    )


def programs() -> st.SearchStrategy[Program]:
    """Three dense programs for each routed one."""
    return st.integers(0, 3).flatmap(lambda i: _dense() if i else _routed())


# ---- tracing -------------------------------------------------------------------------------------


def trace(program: Program) -> tuple[fx.GraphModule, list[list[Tensor]]]:
    """The forward graph that is sliced, and the inputs of every rank: data, then parameters."""
    if program.kind == "dense":
        function: Callable[..., Any] = dense.function_of(program.steps)
        inputs = [[_data(rows, rank), *_parameters(rank, (P,))] for rank, rows in _ranks(program)]
    else:
        function = routes.function_of(program.steps)
        shapes = routes.parameter_shapes()
        inputs = [
            [_data(rows, rank), *_parameters(rank, *shapes)] for rank, rows in _ranks(program)
        ]
    hint = program.batches[0] if program.kind == "dense" else max(5, *program.batches)
    shapes_of = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes_of, allow_non_fake_inputs=True)
    fakes = [_faked(mode, tensor, i) for i, tensor in enumerate([_data(hint, 0), *inputs[0][1:]])]
    with mode, mock.patch.object(FakeTensor, "tolist", _to_list):
        gm = make_fx(function, pre_dispatch=True)(*fakes)
    _check_guards(shapes_of, fakes[0].shape[0], program)
    for i, (node, value) in enumerate(zip(graph.placeholders(gm.graph), fakes, strict=True)):
        node.meta["example_value"] = value
        if i:
            source = UnspecializedNNModuleSource(LocalSource(f"p{i}"))
            node._dynamo_source = source  # pyright: ignore[reportAttributeAccessIssue]
    graph.set_phase(gm, graph.Phase.FORWARD)
    functionalize(gm.graph)
    return gm, inputs


def _check_guards(shapes: ShapeEnv, size: int | torch.SymInt, program: Program) -> None:
    """Raises NoProgram where the trace is not that of every rank's number of rows."""
    expr = pl.expression(size)
    for rows in program.batches:
        guards = [guard.expr.xreplace({expr: sympy.Integer(rows)}) for guard in shapes.guards]
        if sympy.false in guards or (expr.is_Integer and expr != rows):
            raise NoProgram(f"the trace is not one of {rows} rows")


def _to_list(sizes: Tensor) -> list[Any]:
    """Element by element, as graphs of Dynamo read lists of sizes."""
    return [sizes[i].item() for i in range(len(sizes))]


def _ranks(program: Program) -> Iterator[tuple[int, int]]:
    return enumerate(program.batches)


def _data(rows: int, rank: int) -> Tensor:
    num = rows * S * D
    values = torch.linspace(1, 2, num, dtype=torch.float64).mul(37 + rank).sin()
    return values.view(rows, S, D)


def _parameters(rank: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / 3 for shape in shapes]


def _faked(mode: FakeTensorMode, tensor: Tensor, index: int) -> FakeTensor:
    sizes = [DimDynamic.STATIC] * tensor.dim()
    if not index:
        sizes[0] = DimDynamic.DYNAMIC
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    given = tensor.detach().requires_grad_()
    return mode.from_tensor(given, source=ConstantSource(f"i{index}"), symbolic_context=context)


# ---- comparing -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _rules_seen() -> Generator[dict[fx.Node, str]]:
    """Which rule was asked for each node."""
    seen: dict[fx.Node, str] = {}
    find = pl.rule_for

    def rule_for(node: fx.Node) -> pl.Rule | None:
        rule = find(node)
        if rule is not None:
            seen[node] = name_of(rule)
        return rule

    with mock.patch.object(pl, "rule_for", rule_for):
        yield seen


def name_of(rule: pl.Rule) -> str:
    return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"


def check(program: Program) -> Outcome:
    """Slice it and compare. Raises NoProgram, Different, or whatever fails in one that was accepted."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with fake.world(dense.NUM_RANKS):
            return _check(program)
    finally:
        torch.set_default_dtype(default)


def _check(program: Program) -> Outcome:
    try:
        gm, inputs = trace(program)
        expected = _run(gm, inputs)
    except Exception as error:
        raise NoProgram(f"{type(error).__name__}: {error}") from error
    return _check_traced(program, gm, inputs, expected)


def _check_traced(
    program: Program,
    gm: fx.GraphModule,
    inputs: list[list[Tensor]],
    expected: tuple[Results, Results],
) -> Outcome:
    before = gm.graph.python_code("self").src
    sliced = fx.GraphModule(gm, gm.graph)
    with _rules_seen() as seen:
        try:
            plan = _plan(program, gm)
            if not plan.sliced_starts:
                raise PassError(plan.remarks[0].message if plan.remarks else "no collective")
            instantiate(sliced, plan, program.slices)
        except PassError as error:
            if sliced.graph.python_code("self").src != before:
                raise Different("a refused program has changed") from error
            return Outcome(False, str(error), asked=set(seen.values()))
    if gm.graph.python_code("self").src != before:
        raise Different("slicing changed the program as written")
    bf16 = any(t.dtype is torch.bfloat16 for n in gm.graph.nodes for t in _fakes_of(n))
    tolerance = 0.0 if plan.is_exact else TOLERANCE_BF16 if bf16 else TOLERANCE
    _compare(_run(sliced, inputs), expected, tolerance, program)
    ran = collections.Counter(
        seen[node] for node in plan.decisions if node in seen and _runs(plan, node)
    )
    return Outcome(True, rules=ran, asked=set(seen.values()))


def _fakes_of(node: fx.Node) -> Iterator[Tensor]:
    return graph.tensors_of(node.meta.get("val"))


def _runs(plan: slicing.Plan, node: fx.Node) -> bool:
    """Whether slices have something of their own to do there, be it to forward a row index."""
    return plan.is_sliced(node) or bool(plan.decisions[node].groups)


def _plan(program: Program, gm: fx.GraphModule) -> slicing.Plan:
    exact = NONE if program.is_exact else None
    if program.axis == "batch" and not program.is_trimmed:
        return slicing.prove(gm, exact=exact)
    return ANALYSES[program.axis](gm, exact=exact)


Results = list[list[Tensor]]


def _run(gm: fx.GraphModule, inputs: list[list[Tensor]]) -> tuple[Results, Results]:
    """Every rank's outputs, and the gradients of its inputs."""
    own = [[tensor.detach().clone().requires_grad_() for tensor in rank] for rank in inputs]
    torch.manual_seed(0)
    outputs = lockstep.play(gm, own)
    terms = [
        (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum()
        for rank in outputs
        for y in rank
        if y.requires_grad
    ]
    if terms:
        torch.stack(terms).sum().backward()
    gradients = [[torch.zeros_like(t) if t.grad is None else t.grad for t in rank] for rank in own]
    return [[y.detach() for y in rank] for rank in outputs], gradients


def _compare(
    found: tuple[Results, Results],
    expected: tuple[Results, Results],
    tolerance: float,
    program: Program,
) -> None:
    for what, own, written in zip(("output", "gradient"), found, expected, strict=True):
        for rank, (ys, zs) in enumerate(zip(own, written, strict=True)):
            for i, (y, z) in enumerate(zip(ys, zs, strict=True)):
                difference = _difference(y, z, tolerance)
                if difference:
                    raise Different(f"{what} {i} of rank {rank} {difference}: {program.to_json()}")


def _difference(y: Tensor, z: Tensor, tolerance: float) -> str:
    if y.shape != z.shape or y.dtype != z.dtype:
        return f"is {y.dtype} {tuple(y.shape)} for {z.dtype} {tuple(z.shape)}"
    if torch.allclose(y, z, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"differs by {(y - z).abs().max():.2g}"
