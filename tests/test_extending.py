"""Operators and transports of users: docs/extending.md, a grouped product, a model from elsewhere, a
transport of its own."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap
from overlap import collectives, compilation, cost, placement, printing
from overlap.cost import Work
from overlap.errors import ConfigError
from overlap.hardware import load
from overlap.placement import like
from tests import routed, transport_ops
from tests.dist import run_ranks
from tests.routed import D, E
from tests.sliced import check_same, compare, run
from tests.tracing import find, trace

aten = torch.ops.aten
EXTENDING = Path(__file__).parents[1] / "docs" / "extending.md"


# --- a grouped product in a kernel of its own, as with Triton -------------------------------------


@torch.library.custom_op("overlap_tests::grouped_gemm", mutates_args=())
def grouped_gemm(x_ND: Tensor, weights_LDF: Tensor, ends_L: Tensor) -> Tensor:
    """Row n times the matrix of its group; group l ends before row ends_L[l]."""
    parts = x_ND.tensor_split(ends_L[:-1].long())
    return torch.cat([x @ w for x, w in zip(parts, weights_LDF, strict=True)])


@torch.library.custom_op("overlap_tests::grouped_gemm_wgrad", mutates_args=())
def grouped_gemm_wgrad(x_ND: Tensor, grad_NF: Tensor, ends_L: Tensor) -> Tensor:
    pairs = zip(
        x_ND.tensor_split(ends_L[:-1].long()),
        grad_NF.tensor_split(ends_L[:-1].long()),
        strict=True,
    )
    return torch.stack([x.t() @ g for x, g in pairs])


@grouped_gemm.register_fake
def _(x_ND: Tensor, weights_LDF: Tensor, ends_L: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weights_LDF.shape[2])


@grouped_gemm_wgrad.register_fake
def _(x_ND: Tensor, grad_NF: Tensor, ends_L: Tensor) -> Tensor:
    return x_ND.new_empty(ends_L.shape[0], x_ND.shape[1], grad_NF.shape[1])


def _backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, ...]:
    x_ND, weights_LDF, ends_L = ctx.saved_tensors
    back_ND = grouped_gemm(grad_NF, weights_LDF.transpose(1, 2), ends_L)
    return back_ND, grouped_gemm_wgrad(x_ND, grad_NF, ends_L), None


grouped_gemm.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)

GEMM = torch.ops.overlap_tests.grouped_gemm
WGRAD = torch.ops.overlap_tests.grouped_gemm_wgrad


def gemm_work(call: cost.Call) -> Work:
    (rows, depth), width = call.shape(0), call.result.shape[-1]
    return Work(2.0 * rows * depth * call.sizes.size(width), call.moved_bytes(), call.dtype())


@pytest.fixture
def gemm_is_registered() -> Iterator[None]:
    register_gemm()
    yield
    del placement._RULES[GEMM], cost._COSTS[GEMM], cost._COSTS[WGRAD]


def register_gemm() -> None:
    overlap.register_rule(GEMM)(
        like(aten._grouped_mm, self="x_ND", mat2="weights_LDF", offs="ends_L")
    )
    overlap.register_cost(GEMM, gemm_work)
    overlap.register_cost(WGRAD, gemm_work)


def by_gemm(m: routed.Layer, rows_ND: Tensor, received_PL: Tensor) -> Tensor:
    ends_L = received_PL.sum(0).cumsum(0).to(torch.int32)
    return F.relu(torch.ops.overlap_tests.grouped_gemm(rows_ND, m.experts_LDD, ends_L))


# --- a model in the style of those on hubs, its experts spread by a wrapper -----------------------


class ExpertParallel:
    """Sends rows to the ranks of their experts and back, as a wrapper around local experts."""

    def __init__(self, group: str, ranks: int) -> None:
        self.group, self.ranks = group, ranks

    def send(self, rows: Tensor, counts: Tensor) -> tuple[list[Tensor], Any]:
        """The rows of each local expert."""
        received = funcol.all_to_all_single(counts, None, None, self.group)
        sent_by_rank = counts.view(self.ranks, -1).sum(1).tolist()
        received_by_rank = received.view(self.ranks, -1).sum(1).tolist()
        rows = routed.a2a(rows, received_by_rank, sent_by_rank, self.group)
        table = received.view(self.ranks, -1)
        rows, back = routed.by_expert(table, rows)
        return list(rows.split(table.sum(0).tolist())), (back, sent_by_rank, received_by_rank)

    def bring_back(self, parts: list[Tensor], how: Any) -> Tensor:
        back, sent, received = how
        return routed.a2a(torch.cat(parts)[back], sent, received, self.group)


class HubMoE(nn.Module):
    """Softmax router, top-k weights that add up to one, a one-hot mask of the experts, a loop over
    them, `index_add_` into the result."""

    def __init__(self, group: str, ranks: int, top_k: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top_k = top_k
        self.spread = ExpertParallel(group, ranks)
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))
            for _ in range(E // ranks)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, D)
        weights, chosen = F.softmax(self.gate(flat), dim=-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        mask = F.one_hot(chosen, num_classes=E)
        order = chosen.view(-1).argsort(stable=True)
        token = order // self.top_k
        parts, how = self.spread.send(flat[token], mask.sum((0, 1)))
        outputs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        rows = self.spread.bring_back(outputs, how) * weights.view(-1)[order, None]
        result = torch.zeros_like(flat)
        result.index_add_(0, token, rows)
        return result.view_as(hidden)


def make(name: str, group: str) -> nn.Module:
    match name:
        case "gemm":
            return routed.Layer(routed.Steps(experts=by_gemm), 2, group)
        case "hub":
            return HubMoE(group, 2)
        case _:
            return transport_ops.Layer(routed.Steps(), 2, group)


def compare_on_ranks(rank: int, ranks: int, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Sliced beside as written, along every axis: how many collectives run once per slice."""
    if "gemm" in names:
        register_gemm()
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    found: list[tuple[int, ...]] = []
    x = torch.randn(5 - rank, 6, D, generator=torch.Generator().manual_seed(rank))
    for name in names:
        module = make(name, dist.group.WORLD.group_name)
        slicers = [
            compare(module, [(x,)], (2,), axis=axis) for axis in ("batch", "token", "expert")
        ]
        found.append(tuple(len(s.plan.sliced_starts) for s in slicers if s.plan))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", ["gemm", "hub", "transport"])
def test_on_two_ranks_along_every_axis(name: str) -> None:
    for found in run_ranks(compare_on_ranks, 2, [name], timeout_s=280):
        assert found == [(3, 3, 2)]


def train(rank: int, ranks: int) -> tuple[str, list[str], list[str]]:
    """Through the backend: the dump of the backward, its starts' groups, and the remarks."""
    module = make("transport", dist.group.WORLD.group_name)
    own = copy.deepcopy(module)
    step = torch.compile(own, backend="overlap", fullgraph=True, options={"slices": 2})
    x = torch.randn(4, 6, D, generator=torch.Generator().manual_seed(rank))
    check_same(run(own, step, (x,)), run(module, module, (x,)))
    [record] = [r for r in compilation.records() if r.graphs]
    [backward] = [g for g in record.graphs if g.kind == "backward"]
    assert backward.scheduled is not None
    return backward.dump, list(backward.scheduled.start_order), [str(r) for r in record.remarks]


@pytest.mark.dist
def test_a_transport_is_scheduled_and_compared() -> None:
    [(dump, starts, remarks), other] = run_ranks(train, 2, timeout_s=280)
    assert not remarks and starts == other[1]
    check_backward(dump, starts)


def check_backward(dump: str, starts: list[str]) -> None:
    assert len(starts) == 4
    lines = [line for line in dump.splitlines() if " by=overlap_tests.a2a_start" in line]
    assert len(lines) == 4 and all(" = all_to_all(" in line for line in lines)
    assert re.search(
        r"^, *\w+: .* by=overlap_tests.a2a_start.*\n\|", dump, re.MULTILINE
    )  # in flight


# --- in one process -------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_a_transport_in_one_process(group: str) -> None:
    """Sliced along every axis, and through the backend; the other rank has no rows."""
    assert compare_on_ranks(0, 2, ["transport"]) == [(3, 3, 2)]


def test_a_transport_through_the_backend(group: str) -> None:
    dump, starts, remarks = train(0, 2)
    assert not remarks
    check_backward(dump, starts)


def test_an_unknown_operator_keeps_its_exchange_whole_and_says_how_to_register(group: str) -> None:
    from tests.test_rules_routing import plan_of

    plan, _ = plan_of(make("gemm", group), torch.randn(4, 6, D))
    assert not plan.sliced_starts
    [remark] = plan.remarks
    assert remark.reason == "overlap_tests.grouped_gemm has no placement rule"
    assert remark.advice == (
        "register one with overlap.register_rule(torch.ops.overlap_tests.grouped_gemm), as "
        "docs/extending.md shows"
    )


def test_a_cost_of_its_own(gemm_is_registered: None) -> None:
    gm = trace(GEMM, torch.zeros(8, 16), torch.zeros(2, 16, 4), torch.tensor([3, 8]))
    found = cost.estimate(gm, load("h100"), lambda name: 2)
    bare = trace(aten.mm, torch.zeros(8, 16), torch.zeros(16, 4))
    product = cost.estimate(bare, load("h100"), lambda name: 2)
    assert found.nodes["grouped_gemm"].compute_us > product.nodes["mm"].compute_us > 0


def exchange(x: Tensor) -> Tensor:
    return transport_ops.all_to_all(x, [3, 1], [2, 2], "ep")


def test_a_transport_is_recognised() -> None:
    gm = trace(exchange, torch.zeros(4, 8))
    start, wait = find(gm, "a2a_start"), find(gm, "a2a_wait")
    assert collectives.is_start(start) and collectives.is_wait(wait)
    assert collectives.start_of(wait) is start
    assert collectives.kind_of(start) is collectives.Kind.ALL_TO_ALL
    assert collectives.group_of(start) == "ep"
    assert collectives.splits_of(start) == ([3, 1], [2, 2])
    assert collectives.volume_of(start, 128, 2) == 64
    assert "all_to_all(x_1, [3, 1], [2, 2]) group=ep by=overlap_tests.a2a_start" in printing.dump(
        gm
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "transport overlap_tests.a2a_start is registered already"),
        ({"start": aten.relu}, "no argument 'x' of aten.relu; the arguments are: self"),
        ({"start": transport_ops.start}, "expected an operator such as torch.ops.my_library.my_op"),
        (
            {"start": aten.expand, "rows": "self", "group": "size", "wait": aten.add},
            "aten.add cannot wait for aten.expand: it takes",
        ),
    ],
)
def test_a_wrong_declaration_is_an_error(options: dict[str, Any], message: str) -> None:
    fields = {"start": torch.ops.overlap_tests.a2a_start, "rows": "x", "group": "group"} | options
    with pytest.raises(ConfigError, match=re.escape(message)):
        overlap.register_transport(overlap.Transport(**fields))


def test_a_wrapped_operator_is_an_error() -> None:
    with pytest.raises(ConfigError, match="name the operator by its library"):
        overlap.register_rule(grouped_gemm)
    with pytest.raises(ConfigError, match="name the operator by its library"):
        overlap.register_cost(grouped_gemm, gemm_work)


def test_like_names_arguments_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"no argument 'x' of aten\.mul; the arguments are: other"
    ):
        like(aten.mul, x="a")
    with pytest.raises(ConfigError, match=r"aten\.erfinv has no placement rule to be like"):
        like(aten.erfinv, self="a")


def test_the_page_on_extending_runs() -> None:
    names: dict[str, Any] = {
        "overlap": overlap, "torch": torch, "nn": nn, "Tensor": Tensor, "Sequence": Sequence,
        "Work": Work, "Split": placement.Split, "Decision": placement.Decision,
    }  # fmt: skip
    known = (placement._RULES, cost._COSTS, collectives._TRANSPORTS, collectives._WAITS)
    before = [dict(registry) for registry in known]
    try:
        blocks = re.findall(
            r"^```python\n(.*?)^```", EXTENDING.read_text(), re.MULTILINE | re.DOTALL
        )
        for block in blocks:
            exec(compile(block, str(EXTENDING), "exec"), names)

        class Body(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = names["Block"](6)

            def forward(self, x: Tensor) -> Tensor:
                y = self.block(x)
                return torch.ops.extending.swiglu(y.detach(), x.detach()) + torch.erfinv(y.tanh())

        slicer = compare(Body(), [(torch.randn(4, 6),)], (2,))
        assert slicer.plan is not None
        assert not slicer.refused
        [remark] = slicer.plan.remarks
        assert remark.reason == "region 'up' stays whole, as its annotate(slice=False) asks"
        sliced = {
            placement.operator_name(n) for n in slicer.plan.decisions if slicer.plan.is_sliced(n)
        }
        assert {"extending.swiglu", "aten.erfinv"} <= sliced
    finally:
        for registry, entries in zip(known, before, strict=True):
            registry.clear()
            registry.update(entries)
