"""Every operator with a rule: one program that has to be sliced, and one that has to be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from overlap import placement as pl
from overlap import slicing
from overlap.instantiate import instantiate
from tests.rule_cases import NEGATIVE, POSITIVE, B
from tests.tracing import trace

NAMES = sorted(pl.name_of(operator) for operator in pl.registered_rules())

PROVEN_ELSEWHERE = {
    "aten._grouped_mm", "aten.bincount", "aten.histc", "aten.index_add", "aten.index_put",
    "aten.index_copy", "aten.item", "aten._local_scalar_dense", "aten.dot", "aten.arange",
    "aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_size",
    "aten.sym_constrain_range", "aten.sym_constrain_range_for_size",
    "aten.zeros", "aten.ones", "aten.empty", "aten.full",
    "aten.new_zeros", "aten.new_ones", "aten.new_empty", "aten.new_full",
}  # fmt: skip
"""With routed rows or with sizes: test_rules_routing.py, test_soundness.py."""

ALWAYS_REFUSED = {
    "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.bernoulli", "aten.rrelu",
    "aten.native_dropout", "aten.multinomial", "aten.masked_select",
}  # fmt: skip
NEVER_REFUSED = {
    "aten.alias", "aten.detach", "aten.clone", "aten.contiguous", "aten.lift_fresh_copy",
    "aten.type_as", "aten.positive", "aten.zeros_like", "aten.ones_like",
    "aten.empty_like", "aten.full_like", "aten.fill", "aten.zero", "aten._local_scalar_dense",
}  # fmt: skip
"""They change no row, or their values are not read."""


def is_tested_by_routing(name: str) -> bool:
    return not name.startswith("aten.") or name in PROVEN_ELSEWHERE


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, 4, 6, generator=generator, dtype=torch.float64)
    i = torch.randint(0, 6, (B, 4), generator=generator)
    return x, i, torch.randn(6, 6, generator=generator, dtype=torch.float64)


def operators(gm: fx.GraphModule, plan: slicing.Plan) -> set[str]:
    return {pl.operator_name(n) for n in gm.graph.nodes if n.op != "output" and plan.is_sliced(n)}


def run(gm: fx.GraphModule) -> list[Tensor]:
    x, i, w = inputs()
    x.requires_grad_()
    w.requires_grad_()
    result = gm(x, i, w)
    outputs: list[Any] = list(result) if isinstance(result, tuple | list) else [result]
    weights = (torch.linspace(0.5, 1.5, y.numel()).view(y.shape) for y in outputs)
    terms = [(y.double() * weight).sum() for y, weight in zip(outputs, weights, strict=True)]
    total = sum(terms)
    if total.requires_grad:
        total.backward()
    grads = [t.grad if t.grad is not None else torch.zeros(()) for t in (x, w)]
    return [*(y.detach() for y in outputs), *grads]


def check_equal(gm: fx.GraphModule, plan: slicing.Plan) -> None:
    sliced = fx.GraphModule(gm, gm.graph)
    instantiate(sliced, plan, 3)
    torch.manual_seed(0)
    expected = run(gm)
    torch.manual_seed(0)
    for y, z in zip(run(sliced), expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", sorted(POSITIVE))
def test_operator_is_sliced(name: str) -> None:
    gm = trace(POSITIVE[name], *inputs())
    plan = slicing.prove(gm)
    assert name in operators(gm, plan), [r.reason for r in plan.refused]
    check_equal(gm, plan)


@pytest.mark.parametrize("name", sorted(NEGATIVE))
def test_operator_is_refused(name: str) -> None:
    gm = trace(NEGATIVE[name], *inputs())
    plan = slicing.prove(gm)
    refused = {pl.operator_name(r.node): r.reason for r in plan.refused}
    assert name in refused, refused
    assert "its placement rule stopped" not in refused[name]
    check_equal(gm, plan)


def test_every_operator_has_a_positive_and_a_negative_program() -> None:
    mine = {name for name in NAMES if not is_tested_by_routing(name)}
    assert mine - set(POSITIVE) - ALWAYS_REFUSED == set()
    assert mine - set(NEGATIVE) - NEVER_REFUSED == set()


def test_every_operator_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "rules.md").read_text()
    documented = set(text.replace("`", " ").replace(",", " ").split())
    assert set(NAMES) - documented == set()


def test_no_other_operator_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "rules.md").read_text()
    words = text.replace("`", " ").replace(",", " ").split()
    assert {word for word in words if word.startswith("aten.")} - set(NAMES) == set()
