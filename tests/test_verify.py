"""One negative test for each rule: the whole message."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from overlap import graph, verify
from overlap.errors import ConfigError, VerifyError
from overlap.graph import Phase, Tag
from tests.tracing import all_to_all, c10d, find, trace, wait

X = torch.ones(4, 4)


def broken(gm: fx.GraphModule, phase: Phase, before: verify.Signature | None = None) -> str:
    with pytest.raises(VerifyError) as error:
        verify.verify(gm, phase, before, after="pass 'p'")
    return str(error.value)


def exchange(x: torch.Tensor, w: torch.Tensor):
    landed = wait(all_to_all(x))
    return x @ w, torch.relu(landed)


@pytest.fixture
def gm() -> fx.GraphModule:
    return trace(exchange, X, torch.ones(4, 4))


@pytest.fixture(autouse=True)
def _deep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OVERLAP_VERIFY", "deep")


def test_the_list_is_complete():
    statements = {rule.code: (rule.phase.name, rule.statement) for rule in verify.RULES}
    assert list(statements) == sorted(statements)
    listed = re.findall(r"^(V\d+)  (\w+) +(.*)$", inspect.getdoc(verify) or "", re.MULTILINE)
    assert [code for code, _, _ in listed] == list(statements)
    for code, phase, line in listed:
        assert statements[code][0] == phase
        assert line.startswith(statements[code][1])


def test_every_rule_has_a_negative_test():
    tested = {name[5:9].upper() for name in globals() if name.startswith("test_v0")}
    assert tested == {rule.code for rule in verify.RULES}


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_correct_graph_breaks_no_rule(symbolic: bool):
    def program(x: torch.Tensor, w: torch.Tensor, state: torch.Tensor):
        with torch.no_grad():
            state.add_(1)
        start = all_to_all(x)
        total = c10d.all_reduce_(w.clone(), "sum", "dp")
        with torch.autocast("cpu", torch.bfloat16):
            product = torch.nn.functional.dropout(x @ w, training=True)
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        halves = product.split(2)
        return wait(start), halves[0], torch.zeros(count), wait(total), state

    gm = trace(program, torch.ones(4, 6), torch.ones(6, 6), torch.ones(3), symbolic=symbolic)
    before = verify.signature(gm, keep_effects=True)
    verify.verify(gm, Phase.LEGAL, before)
    assert [access.state for access in before.effects or ()] == [
        "grad and autocast modes",
        "the storage of state_1",
        "the storage of clone",
        "random numbers",
    ]


def test_v001_topology(gm: fx.GraphModule):
    find(gm, "matmul").append(find(gm, "w_1"))
    assert_expected_inline(
        broken(gm, Phase.FORWARD),
        """\
1 rule broken after pass 'p': V001: matmul reads w_1, which does not come before it
...
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     matmul: f32[4,4] = aten.matmul(x_1, w_1)
     ^ V001: matmul reads w_1, which does not come before it
     w_1: f32[4,4] = input
     relu: f32[4,4] = aten.relu(wait_tensor)
...""",
    )


def test_v001_lint(gm: fx.GraphModule):
    find(gm, "matmul").name = "relu"
    assert_expected_inline(
        broken(gm, Phase.FORWARD),
        """\
1 rule broken after pass 'p': V001: fx refuses the graph: Node redefined name relu!
...
     relu: f32[4,4] = aten.matmul(x_1, w_1)
     relu: f32[4,4] = aten.relu(wait_tensor)
     return (relu, relu)
     ^ V001: fx refuses the graph: Node redefined name relu!""",
    )


def test_v001_no_output(gm: fx.GraphModule):
    gm.graph.erase_node(find(gm, "output"))
    assert_expected_inline(
        broken(gm, Phase.FORWARD),
        """\
1 rule broken after pass 'p': V001: the graph does not end with its output
...
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     matmul: f32[4,4] = aten.matmul(x_1, w_1)
     relu: f32[4,4] = aten.relu(wait_tensor)
     ^ V001: the graph does not end with its output""",
    )


def test_v002_read_in_flight(gm: fx.GraphModule):
    find(gm, "relu").args = (find(gm, "all_to_all_single"),)
    verify.verify(gm, Phase.JOINT)
    assert_expected_inline(
        broken(gm, Phase.NORMALIZED),
        """\
1 rule broken after pass 'p': V002: relu reads all_to_all_single, which is still in flight
...
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     matmul: f32[4,4] = aten.matmul(x_1, w_1)
     relu: f32[4,4] = aten.relu(all_to_all_single)
     ^ V002: relu reads all_to_all_single, which is still in flight
     return (matmul, relu)""",
    )


def test_v002_read_what_is_written_in_place():
    def program(x: torch.Tensor):
        buffer = x.clone()
        start = c10d.all_reduce_(buffer, "sum", "dp")
        early = buffer.view(-1) + 1
        return early, wait(start)

    assert_expected_inline(
        broken(trace(program, X), Phase.NORMALIZED),
        """\
1 rule broken after pass 'p': V002: view reads all_reduce_, which is still in flight; and 1 more below
...
     clone: f32[4,4] = aten.clone(x_1)
,    all_reduce_: f32[4,4] = all_reduce_(clone, 'sum') group=dp
|    view: f32[16] = aten.view(all_reduce_, [-1])
     ^ V002: view reads all_reduce_, which is still in flight
|    add: f32[16] = aten.add.Tensor(view, 1)
     ^ V002: add reads view, which all_reduce_ is still writing
'    wait_tensor: f32[4,4] = wait(all_reduce_)
     return (add, wait_tensor)""",
    )


def test_v003_no_wait():
    def program(x: torch.Tensor):
        all_to_all(x)
        return x + 1

    assert_expected_inline(
        broken(trace(program, X), Phase.NORMALIZED),
        """\
1 rule broken after pass 'p': V003: all_to_all_single is never waited for
     x_1: f32[4,4] = input
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
     ^ V003: all_to_all_single is never waited for
|    add: f32[4,4] = aten.add.Tensor(x_1, 1)
|    return add""",
    )


def test_v003_two_waits():
    def program(x: torch.Tensor):
        start = all_to_all(x)
        return wait(start), wait(start)

    assert_expected_inline(
        broken(trace(program, X), Phase.NORMALIZED),
        """\
1 rule broken after pass 'p': V003: wait_tensor_1 waits for all_to_all_single, which wait_tensor has waited for already
...
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     wait_tensor_1: f32[4,4] = wait(all_to_all_single)
     ^ V003: wait_tensor_1 waits for all_to_all_single, which wait_tensor has waited for already
     return (wait_tensor, wait_tensor_1)""",
    )


def test_v003_wait_for_nothing():
    def program(x: torch.Tensor):
        return wait(x), wait(x + 1)

    assert_expected_inline(
        broken(trace(program, X), Phase.NORMALIZED),
        """\
1 rule broken after pass 'p': V003: wait_tensor_1 waits for add, which starts nothing
...
     wait_tensor: f32[4,4] = wait(x_1)
     add: f32[4,4] = aten.add.Tensor(x_1, 1)
     wait_tensor_1: f32[4,4] = wait(add)
     ^ V003: wait_tensor_1 waits for add, which starts nothing
     return (wait_tensor, wait_tensor_1)""",
    )


def test_v004_write_in_flight():
    def program(x: torch.Tensor):
        start = all_to_all(x)
        x.view(-1).add_(1)
        return wait(start)

    assert_expected_inline(
        broken(trace(program, X), Phase.NORMALIZED),
        """\
1 rule broken after pass 'p': V004: add_ writes view, which all_to_all_single still uses in flight
...
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
|    view: f32[16] = aten.view(x_1, [-1])
|    add_: f32[16] = aten.add_.Tensor(view, 1)
     ^ V004: add_ writes view, which all_to_all_single still uses in flight
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     return wait_tensor""",
    )


def test_v005_free_in_flight():
    def program(x: torch.Tensor):
        buffer = x * 2
        start = all_to_all(buffer)
        torch.ops.inductor.resize_storage_bytes_(buffer, 0)
        return wait(start)

    gm = trace(program, X)
    verify.verify(gm, Phase.NORMALIZED)
    assert_expected_inline(
        broken(gm, Phase.SCHEDULED),
        """\
1 rule broken after pass 'p': V005: resize_storage_bytes_ frees mul, which all_to_all_single still uses in flight
...
     mul: f32[4,4] = aten.mul.Tensor(x_1, 2)
,    all_to_all_single: f32[4,4] = all_to_all(mul, [2, 2], [2, 2]) group=ep
|    resize_storage_bytes_ = inductor.resize_storage_bytes_(mul, 0)
     ^ V005: resize_storage_bytes_ frees mul, which all_to_all_single still uses in flight
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     return wait_tensor""",
    )


def test_v006_number_of_outputs(gm: fx.GraphModule):
    before = verify.signature(gm)
    find(gm, "output").args = ((find(gm, "relu"),),)
    assert_expected_inline(
        broken(gm, Phase.FORWARD, before),
        """\
1 rule broken after pass 'p': V006: the number of outputs is 1, it was 2
...
     matmul: f32[4,4] = aten.matmul(x_1, w_1)
     relu: f32[4,4] = aten.relu(wait_tensor)
     return (relu,)
     ^ V006: the number of outputs is 1, it was 2""",
    )


def test_v006_order_of_inputs(gm: fx.GraphModule):
    before = verify.signature(gm)
    find(gm, "w_1").append(find(gm, "x_1"))
    assert_expected_inline(
        broken(gm, Phase.FORWARD, before),
        """\
1 rule broken after pass 'p': V006: the input is w_1: f32[4,4], it was x_1: f32[4,4]; and 1 more below
     w_1: f32[4,4] = input
     ^ V006: the input is w_1: f32[4,4], it was x_1: f32[4,4]
     x_1: f32[4,4] = input
     ^ V006: the input is x_1: f32[4,4], it was w_1: f32[4,4]
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
...""",
    )


def test_v006_type_of_an_output():
    def other(x: torch.Tensor, w: torch.Tensor):
        return (x @ w)[:2], torch.relu(x).double()

    before = verify.signature(trace(exchange, X, torch.ones(4, 4)))
    assert_expected_inline(
        broken(trace(other, X, torch.ones(4, 4)), Phase.FORWARD, before),
        """\
1 rule broken after pass 'p': V006: output 0 is f32[2,4], it was f32[4,4]; and 1 more below
...
     relu: f32[4,4] = aten.relu(x_1)
     to: f64[4,4] = aten.to.dtype(relu, f64)
     return (slice_1, to)
     ^ V006: output 0 is f32[2,4], it was f32[4,4]
     ^ V006: output 1 is f64[4,4], it was f32[4,4]""",
    )


def sliced(combine: Callable[..., Any]) -> fx.GraphModule:
    """Two slices of an exponential, combined; `add_1` reads the result in slice 1."""

    def program(x: torch.Tensor):
        first, second = torch.exp(x[:2]), torch.exp(x[2:])
        return combine(first, second) + second

    gm = trace(program, X)
    graph.set_tag(find(gm, "exp"), Tag(slice=0))
    graph.set_tag(find(gm, "exp_1"), Tag(slice=1))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[-1:]:
        graph.set_tag(node, Tag(slice=1))
    return gm


@pytest.mark.parametrize("combine", [torch.add, lambda a, b: torch.cat([a, b])[:2]])
def test_slices_meet_in_a_join(combine: Callable[..., Any]):
    verify.verify(sliced(combine), Phase.LEGAL)


def test_v007_mix_of_slices():
    assert_expected_inline(
        broken(sliced(torch.mul), Phase.FORWARD),
        """\
1 rule broken after pass 'p': V007: mul reads exp of slice 0 and exp_1 of slice 1, and is no join
...
     slice_2: f32[2,4] = aten.slice.Tensor(x_1, 0, 2, 9223372036854775807)
     exp_1: f32[2,4] = aten.exp(slice_2)  # slice=1
     mul: f32[2,4] = aten.mul.Tensor(exp, exp_1)
     ^ V007: mul reads exp of slice 0 and exp_1 of slice 1, and is no join
     add: f32[2,4] = aten.add.Tensor(mul, exp_1)  # slice=1
     return add""",
    )


def test_v007_through_an_untagged_node():
    assert_expected_inline(
        broken(sliced(lambda a, b: a.neg()), Phase.FORWARD),
        """\
1 rule broken after pass 'p': V007: add of slice 1 reads neg of slice 0
...
     exp_1: f32[2,4] = aten.exp(slice_2)  # slice=1
     neg: f32[2,4] = aten.neg(exp)
     add: f32[2,4] = aten.add.Tensor(neg, exp_1)  # slice=1
     ^ V007: add of slice 1 reads neg of slice 0
     return add""",
    )


def test_a_product_adds_to_what_other_slices_made():
    def program(x: torch.Tensor, rows: torch.Tensor):
        other = torch.exp(rows)
        total = torch.addmm(torch.exp(x), other.t(), other)
        return torch.addmm(total, torch.exp(x), x)

    gm = trace(program, X, X[:2])
    names = {"exp": 0, "exp_1": 1, "exp_2": 0}  # traced in the order of the arguments
    for node in gm.graph.nodes:
        if graph.is_call(node, torch.ops.aten.exp):
            graph.set_tag(node, Tag(slice=names[node.name]))
    verify.verify(gm, Phase.LEGAL)
    for node in gm.graph.nodes:
        if graph.is_call(node, torch.ops.aten.addmm):
            graph.set_tag(node, Tag(slice=1))
    with pytest.raises(VerifyError, match="addmm of slice 1 reads exp of slice 0"):
        verify.verify(gm, Phase.LEGAL)


def test_v007_a_product_of_two_slices():
    def program(x: torch.Tensor, rows: torch.Tensor):
        return torch.addmm(x, torch.exp(rows).t(), torch.sin(rows))

    gm = trace(program, X, X[:2])
    graph.set_tag(find(gm, "exp"), Tag(slice=0))
    graph.set_tag(find(gm, "sin"), Tag(slice=1))
    with pytest.raises(VerifyError, match="addmm reads t of slice 0 and sin of slice 1"):
        verify.verify(gm, Phase.LEGAL)


def test_v008_group_without_a_name():
    def program(x: torch.Tensor):
        return wait(all_to_all(x, group=""))

    assert_expected_inline(
        broken(trace(program, X), Phase.FORWARD),
        """\
1 rule broken after pass 'p': V008: the group of all_to_all_single is '', which no argument names
     x_1: f32[4,4] = input
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=
     ^ V008: the group of all_to_all_single is '', which no argument names
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     return wait_tensor""",
    )


def test_v009_other_order_of_starts():
    def program(x: torch.Tensor):
        starts = all_to_all(x), all_to_all(x + 1), c10d.all_reduce(x, "sum", "dp")
        return [wait(start) for start in starts]

    gm = trace(program, X)
    graph.set_phase(gm, Phase.SCHEDULED)
    before = verify.signature(gm)
    find(gm, "all_to_all_single_1").append(find(gm, "all_to_all_single"))
    assert_expected_inline(
        broken(gm, Phase.LEGAL, before),
        """\
1 rule broken after pass 'p': V009: group 'ep' starts all_to_all_single_1, all_to_all_single; the schedule says all_to_all_single, all_to_all_single_1
     x_1: f32[4,4] = input
     add: f32[4,4] = aten.add.Tensor(x_1, 1)
,    all_to_all_single_1: f32[4,4] = all_to_all(add, [2, 2], [2, 2]) group=ep
     ^ V009: group 'ep' starts all_to_all_single_1, all_to_all_single; the schedule says all_to_all_single, all_to_all_single_1
|,   all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
||,  all_reduce: f32[4,4] = all_reduce(x_1, 'sum') group=dp
...""",
    )


def test_v010_shared_storage():
    def program(x: torch.Tensor):
        buffer = x.clone()
        parts = buffer.split(2)
        starts = [c10d.all_reduce_(part, "sum", "dp") for part in parts]
        return [wait(start) for start in starts]

    gm = trace(program, X)
    graph.set_phase(gm, Phase.SCHEDULED)
    assert_expected_inline(
        broken(gm, Phase.LEGAL),
        """\
3 rules broken after pass 'p': V002: all_reduce__1 reads getitem_1, which all_reduce_ is still writing; and 2 more below
...
     getitem_1: f32[2,4] = split[1]
,    all_reduce_: f32[2,4] = all_reduce_(getitem, 'sum') group=dp
|,   all_reduce__1: f32[2,4] = all_reduce_(getitem_1, 'sum') group=dp
     ^ V002: all_reduce__1 reads getitem_1, which all_reduce_ is still writing
     ^ V004: all_reduce__1 writes getitem_1, which all_reduce_ still uses in flight
     ^ V010: all_reduce__1 and all_reduce_ are in flight with one storage
'|   wait_tensor: f32[2,4] = wait(all_reduce_)
 '   wait_tensor_1: f32[2,4] = wait(all_reduce__1)
...""",
    )


def effects(x: torch.Tensor, state: torch.Tensor):
    a, b = torch.rand_like(x), torch.rand_like(x)
    read = state * 2
    state.add_(1)
    return a, b, read, state.sum().item()


def test_v011_random_numbers_swapped():
    gm = trace(effects, X, torch.ones(3))
    before = verify.signature(gm, keep_effects=True)
    find(gm, "rand_like_1").append(find(gm, "rand_like"))
    assert_expected_inline(
        broken(gm, Phase.FORWARD, before),
        """\
1 rule broken after pass 'p': V011: the order of random numbers is rand_like_1, rand_like; it was rand_like, rand_like_1
     x_1: f32[4,4] = input
     state_1: f32[3] = input
     rand_like_1: f32[4,4] = aten.rand_like(x_1, pin_memory=False)
     ^ V011: the order of random numbers is rand_like_1, rand_like; it was rand_like, rand_like_1
     rand_like: f32[4,4] = aten.rand_like(x_1, pin_memory=False)
     mul: f32[3] = aten.mul.Tensor(state_1, 2)
...""",
    )


def test_v011_read_after_the_write():
    gm = trace(effects, X, torch.ones(3))
    before = verify.signature(gm, keep_effects=True)
    find(gm, "add_").append(find(gm, "mul"))
    assert_expected_inline(
        broken(gm, Phase.FORWARD, before),
        """\
1 rule broken after pass 'p': V011: mul moved across a write of the storage of state_1
...
     rand_like_1: f32[4,4] = aten.rand_like(x_1, pin_memory=False)
     add_: f32[3] = aten.add_.Tensor(state_1, 1)
     mul: f32[3] = aten.mul.Tensor(state_1, 2)
     ^ V011: mul moved across a write of the storage of state_1
     sum_1: f32[] = aten.sum(add_)
     item: float(zuf0) = aten.item(sum_1)
...""",
    )


def test_a_rewrite_may_change_effects():
    gm = trace(effects, X, torch.ones(3))
    before = verify.signature(gm)
    find(gm, "rand_like_1").append(find(gm, "rand_like"))
    verify.verify(gm, Phase.FORWARD, before)


def test_v012_no_fake_value(gm: fx.GraphModule):
    del find(gm, "matmul").meta["val"]
    assert_expected_inline(
        broken(gm, Phase.FORWARD),
        """\
1 rule broken after pass 'p': V012: matmul has no recorded fake value
...
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     matmul = aten.matmul(x_1, w_1)
     ^ V012: matmul has no recorded fake value
     relu: f32[4,4] = aten.relu(wait_tensor)
     return (matmul, relu)""",
    )


def test_v013_wrong_fake_value(gm: fx.GraphModule, monkeypatch: pytest.MonkeyPatch):
    matmul = find(gm, "matmul")
    graph.set_fake_value(matmul, graph.fake_value(matmul)[:2].double())
    assert_expected_inline(
        broken(gm, Phase.FORWARD),
        """\
1 rule broken after pass 'p': V013: matmul is recorded as f64[2,4]; its operator makes f32[4,4]
...
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
'    wait_tensor: f32[4,4] = wait(all_to_all_single)
     matmul: f64[2,4] = aten.matmul(x_1, w_1)
     ^ V013: matmul is recorded as f64[2,4]; its operator makes f32[4,4]
     relu: f32[4,4] = aten.relu(wait_tensor)
     return (matmul, relu)""",
    )
    monkeypatch.setenv("OVERLAP_VERIFY", "")
    verify.verify(gm, Phase.FORWARD)
    monkeypatch.setenv("OVERLAP_VERIFY", "shallow")
    with pytest.raises(ConfigError) as error:
        verify.verify(gm, Phase.FORWARD)
    assert str(error.value) == "OVERLAP_VERIFY expects 'deep' or nothing, found 'shallow'"


def test_all_broken_rules_are_shown():
    def program(x: torch.Tensor):
        start = all_to_all(x)
        for _ in range(9):
            x = x + 1
        x = start + 1
        for _ in range(9):
            x = x + 1
        return x.add_(start)

    assert_expected_inline(
        broken(trace(program, X), Phase.NORMALIZED),
        """\
2 rules broken after pass 'p': V002: add_9 reads all_to_all_single, which is still in flight; and 2 more below
     x_1: f32[4,4] = input
,    all_to_all_single: f32[4,4] = all_to_all(x_1, [2, 2], [2, 2]) group=ep
     ^ V003: all_to_all_single is never waited for
|    add: f32[4,4] = aten.add.Tensor(x_1, 1)
|    add_1: f32[4,4] = aten.add.Tensor(add, 1)
...
|    add_7: f32[4,4] = aten.add.Tensor(add_6, 1)
|    add_8: f32[4,4] = aten.add.Tensor(add_7, 1)
|    add_9: f32[4,4] = aten.add.Tensor(all_to_all_single, 1)
     ^ V002: add_9 reads all_to_all_single, which is still in flight
|    add_10: f32[4,4] = aten.add.Tensor(add_9, 1)
|    add_11: f32[4,4] = aten.add.Tensor(add_10, 1)
...
|    add_17: f32[4,4] = aten.add.Tensor(add_16, 1)
|    add_18: f32[4,4] = aten.add.Tensor(add_17, 1)
|    add_: f32[4,4] = aten.add_.Tensor(add_18, all_to_all_single)
     ^ V002: add_ reads all_to_all_single, which is still in flight
|    return add_""",
    )


def test_fake_tensors_know_their_mode(gm: fx.GraphModule):
    """Canary: the deep check relies on this private type and its two context managers."""
    value: Any = graph.fake_value(find(gm, "matmul"))
    assert isinstance(value, torch._subclasses.fake_tensor.FakeTensor)
    mode = trace(exchange, X, torch.ones(4, 4), symbolic=True)
    env = graph.fake_value(find(mode, "matmul")).fake_mode.shape_env
    with env.suppress_guards(), env.ignore_fresh_unbacked_symbols():
        pass
