"""What becomes a run, and that the order of everything else is kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from overlap import collectives
from overlap.inner.cut import Kind, Run, cut, kinds_of
from overlap.inner.runs import Compiler, Kernels
from overlap.inner.subject import RunError, Subject
from tests.inner.compilers import interpreted
from tests.schedule_cases import trace
from tests.tracing import all_to_all, find, wait

aten = torch.ops.aten


def names(run: Run) -> list[str]:
    return [node.name for node in run.nodes]


def runs_of(function: Callable[..., object], *inputs: Tensor) -> list[list[str]]:
    return [names(run) for run in cut(trace(function, *inputs)).runs]


def test_a_graph_without_communication_is_one_run() -> None:
    x = torch.randn(4, 4)
    assert runs_of(lambda x: (x.sin() @ x).relu().sum(), x) == [["sin", "mm", "relu", "sum_1"]]


def test_communication_and_host_reads_cut() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        exchanged = all_to_all(x.sin().cos())
        a = y.exp().sqrt()
        b = wait(exchanged)
        return b.neg().abs() + a

    found = runs_of(program, torch.randn(4, 4), torch.randn(4, 4))
    assert found == [["sin", "cos"], ["exp", "sqrt"], ["neg", "abs_1", "add"]]


def test_a_single_operator_stays_eager() -> None:
    x = torch.randn(4, 4)
    assert runs_of(lambda x: x.view(16).sin().view(2, 8), x) == []


def test_writes_into_a_new_value_stay_eager_beside_the_runs() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = x.sin().cos()
        total = aten.addmm_(aten.mm(x, w), a, w)
        b = a.exp().tan()
        return total, b

    gm = trace(program, torch.randn(4, 4), torch.randn(4, 4))
    assert [names(run) for run in cut(gm).runs] == [["sin", "cos", "exp", "tan"]]
    kinds = {node.name: kind for node, kind in kinds_of(gm).items()}
    assert kinds["mm"] is kinds["addmm_"] is Kind.EAGER


def test_what_reads_the_written_value_comes_in_a_later_run() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        a = x.sin().cos()
        total = aten.addmm_(aten.mm(x, w), a, w)
        return (total.exp() + a).tan()

    found = runs_of(program, torch.randn(4, 4), torch.randn(4, 4))
    assert found == [["sin", "cos"], ["exp", "add", "tan"]]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.copy_(x.sin()), "copy_"),
        (lambda x: torch.rand_like(x), "rand_like"),
        (lambda x: aten._local_scalar_dense(x.sum()), "_local_scalar_dense"),
    ],
)
def test_what_keeps_its_place(function: Callable[..., object], name: str) -> None:
    gm = trace(function, torch.randn(4, 4))
    assert kinds_of(gm)[find(gm, name)] is Kind.FIXED


def test_parts_of_what_keeps_its_place_come_after_it() -> None:
    gm = trace(lambda x: aten.native_dropout(x.sin().cos(), 0.5, True)[0].exp(), torch.ones(4))
    plan = cut(gm)
    at = {node.name: i for i, node in enumerate(plan.order)}
    assert at["sin"] < at["native_dropout"] < at["getitem"] < at["exp"]
    assert [names(run) for run in plan.runs] == [["sin", "cos"]]


def test_complex_numbers_are_eager() -> None:
    gm = trace(lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), torch.randn(4, 2))
    computed = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert {kinds_of(gm)[node] for node in computed} == {Kind.EAGER}


# --- splicing, with an interpreter in the place of a compiler -------------------------------------


def random_graph(seed: int) -> Callable[..., Tensor]:
    """Collectives in flight, sums in place, tuples and views, all over the place."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        pick = random.Random(seed)
        values, flying = [x, w], []
        for _ in range(40):
            a, b = pick.choice(values), pick.choice(values)
            match pick.choice(["add", "mul", "mm", "split", "t", "start", "wait", "sum", "zeros"]):
                case "add":
                    values.append(a + b)
                case "mul":
                    values.append((a * b).tanh())
                case "mm":
                    values.append((a @ b).sigmoid())
                case "split":
                    one, other = a.split([2, 2])
                    values.append(torch.cat([other, one]))
                case "t":
                    values.append(a.t())
                case "start":
                    flying.append(all_to_all(a.contiguous()))
                case "wait" if flying:
                    values.append(wait(flying.pop(pick.randrange(len(flying)))))
                case "sum":
                    values.append(aten.addmm_(aten.mm(a, b), b, a))
                case _:
                    i = torch.tensor([1, 3])
                    values.append(aten.index_add_(torch.zeros_like(x), 0, i, a[:2]))
        values += [wait(one) for one in flying]
        return torch.stack(values).sum(0)

    return program


@pytest.mark.parametrize("seed", range(12))
def test_a_spliced_graph_keeps_order_and_bits(seed: int) -> None:
    gm = trace(random_graph(seed), torch.randn(4, 4), torch.randn(4, 4))
    compiled = Compiler(interpreted).compile("inference", gm)
    compiled.gm.graph.lint()
    assert compiled.kernels and not compiled.failures

    def fixed(gm: fx.GraphModule) -> list[str]:
        is_fixed = (collectives.is_start, collectives.is_wait)
        return [node.name for node in gm.graph.nodes if any(test(node) for test in is_fixed)]

    assert fixed(compiled.gm) == fixed(gm)
    inputs = torch.randn(4, 4), torch.randn(4, 4)
    with Local():
        assert torch.equal(compiled.gm(*inputs), gm(*inputs))


class Local(torch.utils._python_dispatch.TorchDispatchMode):
    """Collectives that give the operand turned around, as soon as they are started."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional":
            return args[0].flip(0) if "all_to_all" in func.name() else args[0]
        return func(*args, **(kwargs or {}))


def test_equal_runs_are_compiled_once() -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return wait(all_to_all((x @ w).relu()))

    def program(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return layer(layer(x, w), v)

    gm = trace(program, *(torch.randn(4, 4) for _ in range(3)))
    compiled = Compiler(interpreted).compile("inference", gm)
    assert (len(compiled.kernels), compiled.num_distinct) == (2, 1)
    assert compiled.num_nodes == 4


def test_a_run_that_does_not_compile_stays_eager() -> None:
    def fails(subject: Subject) -> Kernels:
        raise RunError("no compiler")

    gm = trace(lambda x: x.sin().cos(), torch.randn(4))
    compiled = Compiler(fails).compile("inference", gm)
    assert [(f.first.name, f.last.name, f.reason) for f in compiled.failures] == [
        ("sin", "cos", "no compiler")
    ]
    assert compiled.kernels == () and compiled.num_eager == 2
    x = torch.randn(4)
    assert torch.equal(compiled.gm(x), x.sin().cos())


def test_operands_die_inside_the_run() -> None:
    held: list[int] = []

    def counts(subject: Subject) -> Kernels:
        kernels = interpreted(subject)

        def function(operands: list[Tensor]) -> object:
            values = list(operands)
            operands.clear()
            held.append(values[0]._use_count())
            return (values[0].cos().sin(),)

        return Kernels(function, (), kernels.is_tensor, "", kernels.structure, "")

    gm = trace(lambda x: all_to_all(wait(all_to_all(x)).cos().sin()), torch.randn(4, 4))
    compiled = Compiler(counts).compile("inference", gm)
    with Local():
        compiled.gm(torch.randn(4, 4))
    assert held == [1]
