"""Forward, loss and backward as one graph, in one process: what it returns, what it refuses, and
that it hides more than two graphs do."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import overlap
from overlap import compilation
from overlap.checking import MismatchError
from overlap.errors import DivergenceError
from overlap.runtime import agree, scaling


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    """Two ranks, of which this process is the first; collectives return at once."""
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Step(nn.Module):
    """A loss behind a collective that autograd knows. One weight is used twice, one not at all, and
    a buffer is written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x_BD: Tensor) -> Tensor:
        self.num_calls += 1
        return self.rows(x_BD).square().mean()

    def rows(self, x_BD: Tensor) -> Tensor:
        y_BD = funcol.all_to_all_single_autograd(self.linear(x_BD), None, None, dist.group.WORLD)
        return self.linear(y_BD.tanh())


def compiled(module: Any, **options: Any) -> Any:
    given = {"slices": 1, "whole_step": True} | options
    return torch.compile(module, backend="overlap", fullgraph=True, options=given)


def record() -> compilation.Compilation:
    return compilation.records()[-1]


def remarks() -> list[str]:
    return [str(remark) for remark in record().remarks]


def kinds() -> list[str]:
    return [one.kind for one in record().graphs]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Taken from the module."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def two() -> tuple[Step, Any, Step]:
    """A module, the step that was compiled of it, and a copy as written."""
    torch.manual_seed(0)
    module = Step()
    return module, compiled(module), copy.deepcopy(module)


# ---- what it returns ----------------------------------------------------------------------------


@pytest.mark.parametrize("tangent", [1.0, 0.25, -3.0, 0.0])
def test_gradients_are_those_of_the_program_as_written(tangent: float) -> None:
    module, step, written = two()
    x_BD = torch.randn(4, 8, requires_grad=True)
    for call in (step, written):
        x_BD.grad = None
        (call(x_BD) * tangent).backward()
        if call is step:
            assert x_BD.grad is not None
            of_input = x_BD.grad.clone()
    torch.testing.assert_close(of_input, x_BD.grad)
    torch.testing.assert_close(gradients(module), gradients(written))
    assert module.num_calls == written.num_calls == 1
    assert kinds() == ["step", "scale"]
    assert not remarks() or all("nothing moved" in remark for remark in remarks())


def test_an_infinite_loss_shows_in_the_gradients() -> None:
    module, step, _ = two()
    (step(torch.randn(4, 8)) * float("inf")).backward()
    assert not any(gradient.isfinite().any() for gradient in gradients(module).values())


def factor(
    tangent: Tensor, gathered: Sequence[Tensor] = (), groups: Sequence[str] = (), keep: bool = False
) -> Tensor | None:
    """`scaling.factor_of` as a backward calls it."""
    found: list[Tensor | None] = []
    y = torch.ones((), requires_grad=True).clone()
    y.register_hook(lambda _: found.append(scaling.factor_of(tangent, gathered, groups)))
    y.backward(retain_graph=keep)
    return found[0]


def test_a_tangent_of_one_costs_no_pass_over_the_gradients() -> None:
    module, step, _ = two()
    loss = step(torch.randn(4, 8))
    kept = {tensor.data_ptr() for tensor in loss.grad_fn.saved_tensors}
    loss.backward()
    assert {gradient.data_ptr() for gradient in gradients(module).values()} <= kept


def test_gradients_are_scaled_out_of_place_in_their_own_dtype() -> None:
    gradient, double = torch.ones(3), torch.tensor(2.0)
    one = factor(torch.tensor(1.0))
    assert scaling.scaled(gradient, one) is gradient
    assert scaling.copied_if_same(gradient, one) is not gradient
    assert factor(torch.tensor(1.0), keep=True) is not None
    twice = scaling.scaled(gradient.bfloat16(), factor(double))
    assert twice.dtype is torch.bfloat16 and twice.tolist() == [2, 2, 2]
    assert gradient.tolist() == [1, 1, 1]
    zero_dim = scaling.scaled(torch.tensor(1.5, dtype=torch.bfloat16), double)
    assert zero_dim.dtype is torch.bfloat16


def test_ranks_that_scale_their_losses_differently_are_told() -> None:
    one = torch.tensor(1.0)
    same, different = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.5])
    assert factor(one, [same], ["ep"]) is None
    with pytest.raises(DivergenceError, match=r"group 'dp' scale .*: \[1.0, 0.5\]; .* inside the"):
        factor(one, [same, different], ["ep", "dp"])
    nan = torch.tensor(float("nan"))
    assert factor(nan, [nan.expand(2)], ["ep"]) is nan


def test_a_device_is_not_read_and_gradients_become_nan() -> None:
    one = torch.ones((), device="meta")
    factor = scaling.factor_of(one, [torch.ones(2, device="meta")], ["ep"])
    assert factor is not None and factor.device.type == "meta"  # reading it would raise


def test_a_kept_graph_runs_backward_as_often_as_one_likes() -> None:
    module, step, written = two()
    x_BD = torch.randn(4, 8)
    loss, expected = step(x_BD), written(x_BD)
    for keep in (True, True, False):
        loss.backward(retain_graph=keep)
        expected.backward(retain_graph=keep)
        for parameter in module.parameters():  # as clipping does
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        for parameter in written.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    torch.testing.assert_close(gradients(module), gradients(written))


def test_doubleforwards_before_doublebackwards_in_either_order() -> None:
    module, step, written = two()
    x_BD, z_BD = torch.randn(4, 8), torch.randn(4, 8)
    first, second = step(x_BD), step(z_BD)
    (second / 2).backward()
    first.backward()
    (written(x_BD) + written(z_BD) / 2).backward()
    torch.testing.assert_close(gradients(module), gradients(written))


def test_accumulated_gradients_and_other_batches() -> None:
    module, step, written = two()
    for rows in (4, 6, 4):
        x_BD = torch.randn(rows, 8)
        for call in (step, written):
            (call(x_BD) / 3).backward()
    torch.testing.assert_close(gradients(module), gradients(written))


def test_a_loss_that_is_dropped_keeps_no_gradient_alive() -> None:
    module, step, written = two()
    x_BD = torch.randn(4, 8)
    del_me = step(x_BD)
    assert torch.equal(del_me, written(x_BD))
    del del_me
    gc.collect()
    assert all(parameter.grad is None for parameter in module.parameters())
    step(x_BD).backward()
    written(x_BD).backward()
    torch.testing.assert_close(gradients(module), gradients(written))


def test_without_gradients_there_is_a_forward_only() -> None:
    module, step, written = two()
    x_BD = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(step(x_BD), written(x_BD))
    assert kinds() == ["inference"]
    assert module.linear.weight.grad is None


def test_hooks_of_parameters_see_the_scaled_gradient() -> None:
    module, step, written = two()
    seen: list[Tensor] = []
    accumulated: list[Tensor] = []
    for one in (module, written):
        one.linear.weight.register_hook(lambda g: seen.append(g.clone()))
        one.linear.weight.register_post_accumulate_grad_hook(
            lambda p: accumulated.append(p.grad.clone())
        )
    x_BD = torch.randn(4, 8)
    (step(x_BD) * 3).backward()
    (written(x_BD) * 3).backward()
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(accumulated[0], accumulated[1])


def test_gradients_that_are_one_tensor_and_gradients_that_are_an_input() -> None:
    a_D, b_D = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)

    class Sum(nn.Module):
        def forward(self, a_D: Tensor, b_D: Tensor, c_D: Tensor) -> tuple[Tensor, Tensor]:
            total = funcol.all_reduce(c_D, "sum", dist.group.WORLD)  # hides behind the sum
            return ((a_D + b_D) * c_D).sum(), total

    c_D = torch.randn(4)
    call = compiled(Sum())
    for _ in range(2):  # in place on one would show in the other
        call(a_D, b_D, c_D)[0].backward()
    assert a_D.grad is not None and b_D.grad is not None
    torch.testing.assert_close(a_D.grad, 2 * c_D)
    torch.testing.assert_close(b_D.grad, 2 * c_D)
    assert kinds()[0] == "step"


def test_other_results_may_be_returned_detached() -> None:
    class Two(Step):
        def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y_BD = self.rows(x_BD)
            return y_BD.square().mean(), y_BD.detach().argmax()

    module = Two()
    written = copy.deepcopy(module)
    x_BD = torch.randn(4, 8)
    loss, index = compiled(module)(x_BD)
    expected, expected_index = written(x_BD)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected) and torch.equal(index, expected_index)
    torch.testing.assert_close(gradients(module), gradients(written))
    assert kinds() == ["step", "scale"]


class Checkpointed(Step):
    """With dropout of probability 0.5 in what runs again, or without."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def rows(self, x_BD: Tensor) -> Tensor:
        y_BD = checkpoint(self.inner, x_BD, use_reentrant=False)
        assert isinstance(y_BD, Tensor)
        return y_BD

    def inner(self, x_BD: Tensor) -> Tensor:
        y_BD = super().rows(x_BD)
        return F.dropout(y_BD, self.dropout) if self.dropout else y_BD


def test_a_checkpoint_runs_again_within_the_step() -> None:
    module = Checkpointed()
    written = copy.deepcopy(module)
    x_BD = torch.randn(4, 8)
    (compiled(module)(x_BD) * 2).backward()
    (written(x_BD) * 2).backward()
    torch.testing.assert_close(gradients(module), gradients(written))
    (step, scale) = record().graphs
    assert (step.kind, scale.kind) == ("step", "scale")
    assert [one.kind for one in step.collectives] == ["all_to_all"] * 3  # forward, again, backward
    assert any("runs again in the backward" in remark for remark in remarks())


def test_dropout_in_a_checkpoint_draws_the_same_numbers_again() -> None:
    """As two graphs: what eager draws differs from what the compiler draws."""
    module = Checkpointed(dropout=0.5)
    apart = copy.deepcopy(module)
    x_BD = torch.randn(4, 8)
    for one, whole in ((module, True), (apart, False)):
        torch.manual_seed(1)
        compiled(one, whole_step=whole)(x_BD).backward()
    torch.testing.assert_close(gradients(module), gradients(apart))


# ---- how it shows -------------------------------------------------------------------------------


def test_ranks_compare_the_step_where_others_compare_their_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[str, Any]] = []

    def note(key: str, decided: agree.Decided) -> None:
        compared.append((key.rpartition("/")[2], decided.options["whole_step"]))

    monkeypatch.setattr(agree, "compare", note)
    _, step, _ = two()
    step(torch.randn(4, 8)).backward()
    assert compared == [("forward", True), ("backward", True)]


def test_explain_shows_the_step() -> None:
    _, step, _ = two()
    step(torch.randn(4, 8)).backward()
    report = overlap.explain(step)
    assert [one.kind for one in report.graphs] == ["step", "scale"]
    assert [(one.graph, one.kind) for one in report.collectives] == [
        ("step", "all_to_all"),
        ("step", "all_to_all"),
        ("scale", "all_gather"),
    ]
    assert report.graphs[0].before.peak_bytes == record().base_peak_bytes


def test_a_program_that_would_qualify_says_so_once() -> None:
    module = Step()
    compiled(module, whole_step=False)(torch.randn(4, 8)).backward()
    assert kinds() == ["forward", "backward"]
    assert sum("whole_step=True" in remark for remark in remarks()) == 1


def test_check_steps_compares_and_finds_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Step()
    step = compiled(module, check_steps=2)
    for _ in range(3):
        step(torch.randn(4, 8)).backward()
    module.zero_grad()
    monkeypatch.setattr(scaling, "scaled", lambda gradient, factor: gradient * 1.5)
    torch._dynamo.reset()
    wrong = compiled(Step(), check_steps=1)
    with pytest.raises(MismatchError, match=r"gradient \d differs"):
        wrong(torch.randn(4, 8)).backward()


@pytest.mark.parametrize("num_passes", range(12))
def test_every_prefix_of_the_passes_is_a_correct_program(
    monkeypatch: pytest.MonkeyPatch, num_passes: int
) -> None:
    monkeypatch.setenv("OVERLAP_PASSES", str(num_passes))
    module, step, written = two()
    x_BD = torch.randn(4, 8)
    for call in (step, written):
        (call(x_BD) * 2).backward()
    torch.testing.assert_close(gradients(module), gradients(written))
    are_scheduled = [one.scheduled is not None for one in record().graphs]
    assert are_scheduled == [num_passes >= 8, num_passes >= 10]


# ---- what it refuses ----------------------------------------------------------------------------


class Squared(torch.autograd.Function):
    """A backward that is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0] ** 2


class TwoLosses(Step):
    def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y_BD = self.rows(x_BD)
        return y_BD.square().mean(), y_BD.abs().mean()


class NoLoss(Step):
    def forward(self, x_BD: Tensor) -> Tensor:
        return self.rows(x_BD)


class InHalf(Step):
    def forward(self, x_BD: Tensor) -> Tensor:
        return (self.rows(x_BD).half() * 2).float().square().mean()


class NotLinear(Step):
    def forward(self, x_BD: Tensor) -> Tensor:
        y = Squared.apply(self.rows(x_BD))
        assert isinstance(y, Tensor)
        return y.square().mean()


REFUSED = [
    (TwoLosses, "has 2 results with a gradient", "detach whatever else"),
    (NoLoss, r"returns f32\[\S+,8\], which is no scalar loss", "inside the compiled function"),
    (InHalf, "of the backward is f16", "train in bfloat16 or float32"),
    (NotLinear, "may have a backward that is not linear", "see the remark before"),
]


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
@pytest.mark.parametrize(("kind", "reason", "advice"), REFUSED)
def test_what_may_not_be_one_graph_stays_two(
    kind: type[nn.Module], reason: str, advice: str
) -> None:
    module = kind()
    written = copy.deepcopy(module)
    x_BD = torch.randn(4, 8)
    for call in (compiled(module), written):
        results = call(x_BD)
        results = results if isinstance(results, tuple) else (results,)
        sum(2 * y.sum() for y in results).backward()
    torch.testing.assert_close(gradients(module), gradients(written))
    assert kinds() == ["forward", "backward"]
    refused = [remark for remark in remarks() if "stay two graphs" in remark]
    assert len(refused) == 1
    assert refused[0].startswith("refused: ")
    assert re.search(reason, refused[0])
    assert re.search(advice, refused[0])
