"""The pass: lengths of slices, joins and cuts, remarks, and programs it cannot handle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import graph, slicing
from overlap import placement as pl
from overlap.config import Config
from overlap.errors import PassError
from overlap.instantiate import instantiate
from overlap.passes.slice import Slice
from overlap.pipeline import Context
from overlap.placement import Decision, Op
from tests.sliced import compare
from tests.test_soundness import Body, rows
from tests.tracing import all_to_all, find, trace, wait


def context(strict: bool = False) -> Context:
    return Context(Config(strict=strict), lambda name: 2)


def block(m: Body, x: Tensor) -> Tensor:
    y = torch.relu(m.norm(x) @ m.w)
    return y * y.sum(-1, keepdim=True) + torch.arange(x.shape[0])[:, None, None]


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 5, 8])
def test_uneven_and_empty_slices(batch: int) -> None:
    compare(Body(block), [rows(batch)], slices=(2, 3, 4), dynamic=False)


def test_batches_share_one_compile() -> None:
    """A slice of one row costs another compile (sizes 0 and 1 are special to torch)."""
    slicer = compare(Body(block), [rows(n) for n in (8, 6, 5, 7, 4, 12)], slices=(2,))
    assert slicer.num_compiles == 1
    slicer = compare(Body(block), [rows(n) for n in (8, 2, 3)], slices=(4,))
    assert slicer.num_compiles <= 3


def test_two_inputs_with_rows_and_one_without() -> None:
    module = Body(lambda m, x, y, table: x @ m.w * y[:, None, None] + table)
    x = rows(5)[0]
    slicer = compare(module, [(x, torch.randn(5), torch.randn(3, 6))])
    assert not slicer.refused


def exchange(x: Tensor) -> Tensor:
    return wait(all_to_all(torch.relu(x))) + 1


def test_refused_program_is_left_alone_with_a_remark() -> None:
    gm = trace(exchange, torch.randn(8, 4))
    before = str(gm.graph)
    ctx = context()
    Slice(2).run(gm, ctx)
    assert str(gm.graph) == before
    [remark] = ctx.remarks
    assert remark.kind == "refused" and remark.node == "all_to_all_single"
    assert remark.message.startswith(
        "_c10d_functional.all_to_all_single sends rows by their position in the batch"
    )


def test_refusal_is_an_error_if_strict() -> None:
    with pytest.raises(PassError, match="sends rows by their position"):
        Slice(2).run(trace(exchange, torch.randn(8, 4)), context(strict=True))


def test_program_without_data_is_left_alone() -> None:
    gm = trace(lambda x: x + 1, torch.tensor(1.0))
    ctx = context()
    Slice(2).run(gm, ctx)
    assert [r.text for r in ctx.remarks] == [
        "nothing is sliced: no data input has a dim, so there is no batch to slice"
    ]
    with pytest.raises(PassError, match="no data input has a dim"):
        Slice(2).run(gm, context(strict=True))


def test_exchange_of_another_dim_is_sliced() -> None:
    """Blocks of dim 0 go to the ranks, whole batches along dim 1: what sequence parallelism does."""

    def program(x: Tensor) -> Tensor:
        return wait(all_to_all(torch.relu(x).transpose(0, 1))).transpose(0, 1) * 2

    gm = trace(program, torch.randn(6, 4, 3))
    ctx = context()
    Slice(2).run(gm, ctx)
    assert not ctx.remarks
    starts = [n for n in gm.graph.nodes if n.name.startswith("all_to_all")]
    assert [graph.tag_of(n).slice for n in starts] == [0, 1]


def test_batch_is_the_dim_that_slices_most() -> None:
    def program(table: Tensor, x: Tensor) -> Tensor:
        return wait(all_to_all((x * table.sum()).transpose(0, 1)))

    gm = trace(program, torch.randn(5), torch.randn(6, 4, 3))
    plan = slicing.analyse(gm)
    assert plan.batch == 6 and plan.sliced_starts


@pytest.fixture
def broken_rule():
    packet = torch.ops.aten.erfinv

    @pl.register_rule(packet)
    def rule(op: Op) -> Decision:
        raise KeyError("surprise")

    yield packet
    del pl._RULES[packet]


def test_error_in_a_rule_is_a_refusal(broken_rule: Any) -> None:
    gm = trace(lambda x: torch.erfinv(x.tanh()), torch.randn(4, 3))
    plan = slicing.prove(gm)
    [refused] = plan.refused
    assert refused.reason == (
        "aten.erfinv is not proven: its placement rule stopped with KeyError: 'surprise'"
    )


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (pl.Split(1, pl.Base(pl.sympy.Integer(1))), "expected 4 rows along dim 1"),
        (pl.Split(0, pl.Base(pl.sympy.Integer(2))), "expected 8 rows along dim 0"),
        (pl.Split(0, pl.Base(pl.sympy.Symbol("s9"))), "expected 4*s9 rows"),
        (pl.Counts(pl.identity_form(3, "hist:x")), "expected (3,) counts"),
        (pl.Many(()), "has 1 results, and its rule says 0"),
    ],
)
def test_a_rule_is_held_to_the_value(placement: pl.Placement, reason: str) -> None:
    packet = torch.ops.aten.erfinv
    pl.register_rule(packet)(lambda op: (op.place(op["self"]), Decision(placement))[1])
    try:
        gm = trace(lambda x: torch.erfinv(x), torch.randn(4, 3))
        [refused] = slicing.prove(gm).refused
        assert reason in refused.reason
    finally:
        del pl._RULES[packet]


def test_an_operand_that_a_rule_forgot_is_refused() -> None:
    packet = torch.ops.aten.hypot
    pl.register_rule(packet)(lambda op: Decision(op.place(op["self"])))
    try:
        gm = trace(torch.hypot, torch.randn(4, 3), torch.randn(4, 3))
        [refused] = slicing.prove(gm).refused
        assert "uses arg1_1, which differs between slices, where it may not" in refused.reason
    finally:
        del pl._RULES[packet]


def test_unknown_operator_names_what_to_do() -> None:
    gm = trace(lambda x: torch.erfinv(x.tanh()), torch.randn(4, 3))
    [refused] = slicing.prove(gm).refused
    assert refused.message == ("aten.erfinv has no placement rule; the slices are joined before it")
    assert refused.advice == (
        "register one with overlap.register_rule(torch.ops.aten.erfinv), as docs/extending.md shows"
    )


def test_program_that_does_not_trace_in_slices_is_left_alone() -> None:
    """Each slice is looked at by a size that only the data gives."""
    gm = trace(exchange, torch.randn(8, 4))
    plan = slicing.prove(gm)
    bad = find(gm, "relu")
    plan.decisions[bad] = Decision(plan.decisions[bad].placement, replace={"self": 1})
    before = str(gm.graph)
    with pytest.raises(PassError, match="the sliced program does not trace"):
        instantiate(gm, plan, 2)
    assert str(gm.graph) == before
