"""`inner="inductor"`: the values of the program as written, in the order of the schedule."""

from __future__ import annotations

import copy
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as funcol

from models.moe import MoEBlock, MoEConfig
from overlap import compilation, explain
from overlap.compilation import Compilation
from overlap.cost_table import Step
from overlap.errors import PassError
from overlap.inner import inductor
from overlap.inner.runs import Kernels, kernels_of
from overlap.inner.subject import RunError, Subject
from overlap.runtime import fake
from tests.dist import run_ranks
from tests.inner.compilers import interpreted, leave_out_the_compiler
from tests.test_cost_table import TABLE
from tests.test_whole_step_ranks import BlockLoss, gradients, rows, worst


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def compiled(module: nn.Module, **options: Any) -> Any:
    options = {"inner": "inductor", **options}
    return torch.compile(module, backend="overlap", fullgraph=True, options=options)


# --- the order, read back from the code that runs -------------------------------------------------

KERNEL = re.compile(r"^ +(?:cpp_fused_\w+)\(", re.MULTILINE)
KEEPS_ITS_PLACE = ("_c10d_functional", "_local_scalar_dense")


def positions(gm: fx.GraphModule) -> tuple[list[str], dict[str, int]]:
    """What keeps its place in a scheduled graph, in order; for every node how many of them are
    before it."""
    fixed: list[str] = []
    before: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        # A part of a tuple only names memory: it is where the tuple is.
        is_part = node.target is operator.getitem
        before[node.name] = before[node.args[0].name] if is_part else len(fixed)
        fixed += [node.name] * any(part in str(node.target) for part in KEEPS_ITS_PLACE)
    return fixed, before


def positions_in_code(code: str) -> tuple[list[str], dict[str, int], int]:
    """The same of the Python that runs, for what its runs give out; and how many runs it calls."""
    fixed: list[str] = []
    runs: dict[str, int] = {}
    before: dict[str, int] = {}
    for line in code.splitlines():
        name, _, call = line.strip().partition(" = ")
        used = re.match(r"([\w.]+)([(\[])", call)
        match used.groups() if used else ():
            case [function, "("] if any(part in function for part in KEEPS_ITS_PLACE):
                fixed.append(name)
            case [function, "("] if "run_" in function:
                runs[name] = len(fixed)
            case [owner, "["] if owner in runs:
                before[name] = runs[owner]
    return fixed, before, len(runs)


def make_block() -> nn.Module:
    torch.manual_seed(0)
    return MoEBlock(16, MoEConfig(hidden_dim=8, num_experts=4, top_k=2), dist.group.WORLD)


def test_the_order_survives_and_compute_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_the_compiler(monkeypatch)
    with fake.world(2):
        record = compile_only(compiled(make_block(), slices=2), torch.randn(6, 4, 16))
    assert [one.kind for one in record.compiled] == ["forward", "backward"]
    for graph, one in zip(record.graphs, record.compiled, strict=True):
        assert not one.failures
        fixed, before = positions(graph.gm)
        fixed_in_code, in_code, num_runs = positions_in_code(one.gm.code)
        assert fixed_in_code == fixed
        assert in_code == {name: before[name] for name in in_code}
        called = [kernels for node in one.gm.graph.nodes if (kernels := kernels_of(node))]
        assert tuple(called) == one.kernels
        assert num_runs == len(called) > 0
        num_fused = sum(len(KERNEL.findall(kernels.source)) for kernels in called)
        assert 0 < num_fused < one.num_nodes / 2
    assert "kernels of the forward: Inductor's, " in str(explain(record))


def compile_only(step: Any, x: Tensor) -> Compilation:
    """Compile forward and backward. The fake group moves nothing, so that the values that say how
    many rows there are do not fit: running fails or not, after everything is compiled."""
    try:
        step(x)
    except Exception as error:
        print(error)
    return compilation.records()[-1]


# --- what must not be split wrongly, with an interpreter in the place of Inductor -----------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one rank: its collectives give back what they get."""
    with fake.world(1):
        yield


def exchange(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


class Body(nn.Module):
    """`function(module, x)` with a weight and a buffer to use."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def drops(m: Any, x: Tensor) -> Tensor:
    y = exchange(nn.functional.dropout(m.linear(x).relu(), 0.5).sin())
    return nn.functional.dropout(y.cos() * x, 0.3).exp()


def writes(m: Any, x: Tensor) -> Tensor:
    before = m.total.sin() * 2
    m.total += x.detach().sum(0).sigmoid()
    y = exchange(m.linear(x).tanh() * m.total.sigmoid())
    m.total.mul_(0.5)
    return (y + m.total.cos()).square() + before


def hands_out_views(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    y = exchange(m.linear(x).tanh().neg())
    z = y.sin().cos()
    return z, z.t(), z.clone(), x.view(-1), y[1:]


def casts(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = exchange(m.linear(x).relu() + 1)
        return (m.linear(y).sigmoid() * 2).float()


def reads(m: Any, x: Tensor) -> Tensor:
    k = (x[0].abs() * 3).sum().long().clamp(1, 2).item()
    torch._check(k >= 1)
    y = exchange(m.linear(x).relu() * k)
    return (y + torch.ones(k, 6).sin().sum(0) / k).exp()


@pytest.mark.parametrize("function", [drops, writes, hands_out_views, casts, reads])
@pytest.mark.usefixtures("alone")
def test_cut_programs_give_the_bits_of_whole_ones(
    function: Callable[[Any, Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "compile_run", interpreted)
    written, eager, cut = (Body(function) for _ in range(3))
    expected = outcome(written, written)
    # No passes: what differs, the cuts have made.
    whole = outcome(compiled(eager, preset="none", inner="eager"), eager)
    found = outcome(compiled(cut, preset="none"), cut)
    assert all(one.kernels for one in compilation.records()[-1].compiled)
    for value, same, close in zip(found, whole, expected, strict=True):
        assert torch.equal(value, same)
        torch.testing.assert_close(value, close, rtol=2e-2, atol=2e-2)


def outcome(step: Any, module: Any) -> list[Tensor]:
    """Outputs, gradients and the buffer, of two steps that draw the same random numbers."""
    kept: list[Tensor] = []
    for num_rows in (4, 6):
        torch.manual_seed(1)
        x = torch.randn(num_rows, 6, requires_grad=True)
        outputs = step(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(weighted(y) for y in outputs).backward()
        kept += [*outputs, x.grad, module.linear.weight.grad.clone(), module.total.clone()]
    return kept


def weighted(y: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (y * torch.randn(y.shape, generator=generator)).sum()


@pytest.mark.usefixtures("alone")
def test_a_run_that_does_not_compile_is_eager_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(subject: Subject) -> Kernels:
        raise RunError("no compiler")

    monkeypatch.setattr(inductor, "compile_run", fails)
    module = Body(lambda m, x: exchange(x.sin().cos()).exp())
    x = torch.randn(4, 6)
    assert torch.equal(compiled(module)(x), module(x))
    texts = [str(remark) for remark in compilation.records()[-1].remarks]
    (text,) = [text for text in texts if "no compiler" in text]
    assert "the inference's run sin..cos stays eager, since Inductor does not compile it" in text
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no compiler") as error:
        compiled(module, strict=True, slices=1)(x)
    assert isinstance(error.value, PassError) or "PassError" in str(error.value)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("least", "is_eager"), [(None, True), (0, False)])
def test_a_number_that_may_be_negative_is_in_no_run(
    least: int | None, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads_one(m: Any, x: Tensor) -> Tensor:
        k = x.sum().long().item()
        if least is not None:
            torch._check(k >= least)
        return exchange((x.sin().exp() * k).cos().sin())

    monkeypatch.setattr(inductor, "compile_run", interpreted)
    module = Body(reads_one)
    x = torch.full((4, 6), 0.5)
    assert torch.equal(compiled(module, slices=1)(x), module(x))
    (one,) = compilation.records()[-1].compiled
    called = [node.target for node in one.gm.graph.nodes]
    assert (torch.ops.aten.mul.Tensor in called) == is_eager


@pytest.mark.usefixtures("alone")
def test_a_cost_table_prices_the_operators_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "compile_run", interpreted)
    module = Body(lambda m, x: exchange(m.linear(x).sin().cos()).exp().square())
    x = torch.randn(4, 6)
    compiled(module, slices=1)(x)
    program = compilation.records()[-1].program
    table = dataclasses.replace(
        TABLE,
        place=dataclasses.replace(TABLE.place, torch=torch.__version__, ranks=1),
        programs={program: {1: Step(200.0, 210.0)}},
    )
    table.save(tmp_path / "costs.json")
    torch._dynamo.reset()
    step = compiled(module, slices=1, costs=str(tmp_path / "costs.json"))
    torch.testing.assert_close(step(x), module(x))
    record = compilation.records()[-1]
    assert sum(len(one.kernels) for one in record.compiled) > 0
    assert "costs: cost table" in str(explain(record))


def test_a_program_without_a_collective_goes_to_inductor_whole() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    assert torch.equal(compiled(module)(x), torch.compile(module)(x))
    record = compilation.records()[-1]
    assert record.compiled == [] and "Inductor compiles it whole" in str(record.remarks[0])
    assert "kernels: Inductor's, for the whole program" in str(explain(record))


def test_the_generated_code_of_another_device_is_the_same() -> None:
    def code(i: int) -> str:
        return f"""
            # kernel path: /cache/{i}.py
            with torch.cuda._DeviceGuard({i}):
                torch.cuda.set_device({i})
                stream{i} = get_raw_stream({i})
                kernel.run(arg0_1, buf{4}, 64, stream=stream{i})  # {i}
                x = torch.empty(8, device='cuda:{i}')
            'device': DeviceProperties(type='cuda', index={i}, cc=90)"""

    assert inductor.same_on_all_ranks(code(0)) == inductor.same_on_all_ranks(code(11))
    assert "buf4, 64" in inductor.same_on_all_ranks(code(0))


# --- two ranks ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One program on one rank. losses: (loss, as written) of every batch. error: of the summed
    gradients against fp64, and that of the program as written. digests, num_runs: of each graph."""

    kinds: list[str]
    losses: list[tuple[float, float]]
    error: float
    error_as_written: float
    digests: list[str]
    num_runs: list[int]
    failures: list[str]
    num_records: int


def compare(rank: int, num_ranks: int) -> list[Outcome]:
    """An MoE block in two slices, as two graphs and as one, beside the block as written. Kernels of
    the first are kept for the second; the batches of the ranks differ."""
    return [compare_one(rank, whole_step) for whole_step in (False, True)]


def compare_one(rank: int, whole_step: bool) -> Outcome:
    torch._dynamo.reset()
    num_known = len(compilation.records())
    written = BlockLoss()
    own, exact = copy.deepcopy(written), copy.deepcopy(written).double()
    step = compiled(own, slices=2, whole_step=whole_step)
    losses: list[tuple[float, float]] = []
    for size in (6 - rank, 4 + 3 * rank):
        x_BSD, weight_BSD = rows(size, size)
        pair = step(x_BSD, weight_BSD), written(x_BSD, weight_BSD)
        for loss in (*pair, exact(x_BSD.double(), weight_BSD.double())):
            loss.backward()
        losses.append((pair[0].item(), pair[1].item()))
    found, as_written, expected = map(gradients, (own, written, exact))
    record = compilation.records()[-1]
    return Outcome(
        [one.kind for one in record.compiled],
        losses,
        worst(found, expected),
        worst(as_written, expected),
        [one.digest for one in record.compiled],
        [len(one.kernels) for one in record.compiled],
        [failure.reason for one in record.compiled for failure in one.failures],
        len(compilation.records()) - num_known,
    )


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_agree_with_each_other_and_with_eager(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ranks = run_ranks(compare, 2, timeout_s=800, env=env)
    kinds = ["forward", "backward"], ["step", "scale"]
    for one, other, expected in zip(*ranks, kinds, strict=True):
        assert one.digests == other.digests  # of other batches
        for found in (one, other):
            assert found.kinds == expected
            for loss, as_written in found.losses:
                assert loss == pytest.approx(as_written, rel=1e-5)
            assert found.error <= 2 * found.error_as_written + 1e-7
            assert found.failures == []
            assert found.num_runs[0] > 0
            assert found.num_records == 1  # the second batch compiled nothing
