"""Switches, options and bad input of the backend, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlap import compilation
from overlap.checking import Checked, MismatchError
from overlap.errors import ConfigError, DivergenceError, PassError
from overlap.runtime import agree


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    """Two ranks, of which this process is the first; collectives return at once."""
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Reduced(nn.Module):
    """A collective behind a linear layer; rows are exchanged by position, so none is sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(self.linear(x_BD), "sum", dist.group.WORLD).relu()


def compiled(module: nn.Module, **options: Any) -> Any:
    return torch.compile(module, backend="overlap", fullgraph=True, options=options)


def last_remarks() -> list[str]:
    return [str(remark) for remark in compilation.records()[-1].remarks]


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(Exception, match=r"no option 'slice'.*did you mean 'slices'") as error:
        compiled(Reduced(), slice=2)(torch.ones(4, 8))
    assert isinstance(error.value, ConfigError) or "ConfigError" in str(error.value)


def test_a_model_without_collectives_is_left_alone_with_one_remark() -> None:
    module = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    assert torch.equal(compiled(module, slices=2)(x), module(x))
    assert last_remarks() == ["note: the program has no collective, so there is nothing to hide"]


def test_an_exchange_that_is_not_sliced_says_why() -> None:
    compiled(Reduced(), slices=2)(torch.randn(4, 8))
    assert any("all_reduce" in r and "refused" in r for r in last_remarks())


def test_a_program_for_one_width_only_compiles() -> None:
    """Its sizes are symbols, and another value of them would not fit together."""
    x, w, v = torch.randn(8, 6), torch.randn(6, 6, requires_grad=True), torch.randn(6, 6)

    def step(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        q = (x @ w).view(-1, 2, 3)
        reduced = funcol.all_reduce(q.mean(1) @ v[:3, :3], "sum", dist.group.WORLD)
        return reduced.square().mean()

    compiled_step = torch.compile(step, backend="overlap", options={"slices": 2})
    torch.testing.assert_close(compiled_step(x, w, v), step(x, w, v))


def test_strict_makes_a_refusal_an_error() -> None:
    with pytest.raises(Exception, match="strict=True") as error:
        compiled(Reduced(), slices=2, strict=True)(torch.randn(4, 8))
    assert isinstance(error.value, PassError) or "PassError" in str(error.value)


def test_overlap_disable_runs_the_program_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_DISABLE", "1")
    before = len(compilation.records())
    module, x = Reduced(), torch.randn(4, 8)
    assert torch.equal(compiled(module, slices=2)(x), module(x))
    assert len(compilation.records()) == before


@pytest.mark.parametrize("num_passes", range(12))
def test_every_prefix_of_the_passes_is_a_correct_program(
    monkeypatch: pytest.MonkeyPatch, num_passes: int
) -> None:
    monkeypatch.setenv("OVERLAP_PASSES", str(num_passes))
    module, x = Reduced(), torch.randn(6, 8)
    own = copy.deepcopy(module)
    compiled(own, slices=2)(x).sum().backward()
    module(x).sum().backward()
    torch.testing.assert_close(own.linear.weight.grad, module.linear.weight.grad)
    # Three passes before autograd, four on the joint graph, two on each of the graphs that run.
    are_scheduled = [g.scheduled is not None for g in compilation.records()[-1].graphs]
    assert are_scheduled == [num_passes >= 8, num_passes >= 10]


def test_a_budget_that_allows_nothing_keeps_program_order() -> None:
    compiled(Reduced(), slices=1, memory_budget=1)(torch.randn(4, 8))
    assert any("raise memory_budget" in r for r in last_remarks())


def test_ranks_compare_before_the_first_run_of_every_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds: list[str] = []
    monkeypatch.setattr(agree, "compare", lambda key, _: kinds.append(key.rpartition("/")[2]))
    step, x = compiled(Reduced(), slices=1), torch.randn(4, 8)
    y = step(x)
    assert kinds == ["forward"]
    y.sum().backward()
    step(x).sum().backward()
    assert kinds == ["forward", "backward"]
    with torch.no_grad():
        step(x)
    assert kinds == ["forward", "backward", "inference"]


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_divergence_reaches_the_user_as_it_is(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def refuse(key: str, _: agree.Decided) -> None:
        if key.endswith(kind):
            raise DivergenceError("rank 0 and rank 1 decided differently")

    monkeypatch.setattr(agree, "compare", refuse)
    step = compiled(Reduced(), slices=1)
    for _ in range(2):
        with pytest.raises(DivergenceError, match="decided differently"):
            step(torch.randn(4, 8)).sum().backward()


def test_check_steps_passes_a_right_program_and_stops_a_wrong_one() -> None:
    module, x = Reduced(), torch.randn(4, 8)
    step = compiled(module, slices=2, check_steps=1)
    step(x).sum().backward()
    gradient = module.linear.weight.grad
    assert gradient is not None
    module.linear.weight.grad = None
    step(x).sum().backward()
    assert torch.equal(gradient, module.linear.weight.grad)

    wrong = Checked(lambda x: (x * 2,), lambda x: (x * 3,), steps=1)
    with pytest.raises(MismatchError, match="output 0 differs from the program as written"):
        wrong(torch.ones(2, requires_grad=True))


def test_check_steps_finds_a_wrong_gradient() -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *tangents: Tensor) -> Tensor:
            return tangents[0]

    wrong = Checked(lambda x: (Halved.apply(x),), lambda x: (x * 2,), steps=1)
    (y,) = wrong(torch.ones(2, requires_grad=True))
    with pytest.raises(MismatchError, match="gradient 0 differs"):
        y.sum().backward()
