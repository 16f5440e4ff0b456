from __future__ import annotations

import subprocess
import sys

import torch
from expecttest import assert_expected_inline
from torch import fx

from overlap import graph, printing
from overlap.graph import Tag
from tests.tracing import all_to_all, c10d, find, trace, wait


def exchange(x: torch.Tensor, w: torch.Tensor):
    first = all_to_all(x)
    second = c10d.all_reduce_(w.clone(), "sum", "dp")
    product = x @ w
    return torch.relu(wait(first)) + product, wait(second)


def tagged() -> fx.GraphModule:
    gm = trace(exchange, torch.ones(8, 4), torch.ones(4, 4))
    graph.set_tag(find(gm, "relu"), Tag(slice=0, region="layers.0"))
    graph.set_tag(find(gm, "matmul"), Tag(slice=1, stream="side"))
    return gm


def test_gutter_shows_what_is_in_flight():
    assert_expected_inline(
        printing.dump(tagged()),
        """\
     x_1: f32[8,4] = input
     w_1: f32[4,4] = input
,    all_to_all_single: f32[8,4] = all_to_all(x_1, [4, 4], [4, 4]) group=ep
|    clone: f32[4,4] = aten.clone(w_1)
|,   all_reduce_: f32[4,4] = all_reduce_(clone, 'sum') group=dp
||   matmul: f32[8,4] = aten.matmul(x_1, w_1)  # slice=1 stream=side
'|   wait_tensor: f32[8,4] = wait(all_to_all_single)
 |   relu: f32[8,4] = aten.relu(wait_tensor)  # slice=0 region=layers.0
 |   add: f32[8,4] = aten.add.Tensor(relu, matmul)
 '   wait_tensor_1: f32[4,4] = wait(all_reduce_)
     return (add, wait_tensor_1)""",
    )


def test_sizes_print_in_order_of_appearance():
    def ragged(x: torch.Tensor, y: torch.Tensor):
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        return torch.cat([x, y]), torch.zeros(count), x.reshape(-1), x[1:3], x.to(torch.bfloat16)

    gm = trace(ragged, torch.ones(8, 4), torch.ones(6, 4), symbolic=True)
    assert_expected_inline(
        printing.dump(gm),
        """\
     x_1: f32[s0,s1] = input
     y_1: f32[s2,s1] = input
     gt: b8[s0,s1] = aten.gt.Scalar(x_1, 0)
     sum_1: i64[] = aten.sum(gt)
     item: int(u0) = aten.item(sum_1)
     cat: f32[s0 + s2,s1] = aten.cat([x_1, y_1])
     zeros: f32[u0] = aten.zeros([item], device=cpu, pin_memory=False)
     reshape: f32[s0*s1] = aten.reshape(x_1, [-1])
     slice_1: f32[2,s1] = aten.slice.Tensor(x_1, 0, 1, 3)
     to: bf16[s0,s1] = aten.to.dtype(x_1, bf16)
     return (cat, zeros, reshape, slice_1, to)""",
    )


def test_every_kind_of_node_and_argument():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.scale = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor):
            y = self.linear(x).view(2, -1) * self.scale
            y = torch.clamp(y, min=0.5)[..., 1:]
            z = x.new_zeros(2, dtype=torch.int64, device=torch.device("cuda", 3))
            return {"y": y, "z": (z,)}, None, "done"

    assert_expected_inline(
        printing.dump(fx.symbolic_trace(Model())),
        """\
     x = input
     linear = self.linear(x)
     view = linear.view(2, -1)
     scale = self.scale
     mul = operator.mul(view, scale)
     clamp = torch.clamp(mul, min=0.5)
     getitem = clamp[..., 1:]
     new_zeros = x.new_zeros(2, dtype=i64, device=cuda)
     return ({'y': getitem, 'z': (new_zeros,)}, None, 'done')""",
    )


def test_bodies_of_higher_order_operators_follow():
    def branch(x: torch.Tensor):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    assert_expected_inline(
        printing.dump(trace(branch, torch.ones(4))),
        """\
     x_1: f32[4] = input
     sum_1: f32[] = aten.sum(x_1)
     gt: b8[] = aten.gt.Scalar(sum_1, 0)
     true_graph_0 = self.true_graph_0
     false_graph_0 = self.false_graph_0
     cond: (f32[4]) = higher_order.cond(gt, true_graph_0, false_graph_0, (x_1,))
     getitem: f32[4] = cond[0]
     return getitem
true_graph_0:
         arg0_1: f32[4] = input
         sin: f32[4] = aten.sin(arg0_1)
         return (sin,)
false_graph_0:
         arg0_1: f32[4] = input
         cos: f32[4] = aten.cos(arg0_1)
         return (cos,)""",
    )


def test_lanes_beyond_the_margin_widen_it():
    def many(x: torch.Tensor):
        return [wait(start) for start in [all_to_all(x) for _ in range(6)]][-1]

    assert_expected_inline(
        printing.dump(trace(many, torch.ones(8))),
        """\
       x_1: f32[8] = input
,      all_to_all_single: f32[8] = all_to_all(x_1, [4, 4], [4, 4]) group=ep
|,     all_to_all_single_1: f32[8] = all_to_all(x_1, [4, 4], [4, 4]) group=ep
||,    all_to_all_single_2: f32[8] = all_to_all(x_1, [4, 4], [4, 4]) group=ep
|||,   all_to_all_single_3: f32[8] = all_to_all(x_1, [4, 4], [4, 4]) group=ep
||||,  all_to_all_single_4: f32[8] = all_to_all(x_1, [4, 4], [4, 4]) group=ep
|||||, all_to_all_single_5: f32[8] = all_to_all(x_1, [4, 4], [4, 4]) group=ep
'||||| wait_tensor: f32[8] = wait(all_to_all_single)
 '|||| wait_tensor_1: f32[8] = wait(all_to_all_single_1)
  '||| wait_tensor_2: f32[8] = wait(all_to_all_single_2)
   '|| wait_tensor_3: f32[8] = wait(all_to_all_single_3)
    '| wait_tensor_4: f32[8] = wait(all_to_all_single_4)
     ' wait_tensor_5: f32[8] = wait(all_to_all_single_5)
       return wait_tensor_5""",
    )


def test_moving_a_node_renames_nothing():
    gm = tagged()
    before, lines = printing.dump(gm), printing.lines(gm)
    find(gm, "wait_tensor").prepend(find(gm, "matmul"))
    find(gm, "all_to_all_single").prepend(find(gm, "matmul"))
    assert sorted(printing.lines(gm)) == sorted(lines)
    assert_expected_inline(
        printing.dump_diff(before, printing.dump(gm)),
        """\
      x_1: f32[8,4] = input
      w_1: f32[4,4] = input
+     matmul: f32[8,4] = aten.matmul(x_1, w_1)  # slice=1 stream=side
 ,    all_to_all_single: f32[8,4] = all_to_all(x_1, [4, 4], [4, 4]) group=ep
 |    clone: f32[4,4] = aten.clone(w_1)
 |,   all_reduce_: f32[4,4] = all_reduce_(clone, 'sum') group=dp
-||   matmul: f32[8,4] = aten.matmul(x_1, w_1)  # slice=1 stream=side
 '|   wait_tensor: f32[8,4] = wait(all_to_all_single)
  |   relu: f32[8,4] = aten.relu(wait_tensor)  # slice=0 region=layers.0
  |   add: f32[8,4] = aten.add.Tensor(relu, matmul)""",
    )
    assert printing.dump_diff(before, before) == ""


def test_two_processes_print_the_same():
    program = "from tests.test_printing import tagged; from overlap.printing import dump"
    command = [sys.executable, "-c", f"{program}; print(dump(tagged()))"]
    other = subprocess.run(command, capture_output=True, text=True, check=True)
    assert other.stdout.rstrip("\n") == printing.dump(tagged())


def test_messages_of_assertions_are_left_out():
    nodes = fx.Graph()
    condition = nodes.placeholder("condition")
    message = "Runtime assertion failed for expression s77 > 0"
    nodes.call_function(torch.ops.aten._assert_scalar.default, (condition, message))
    nodes.output(())
    assert_expected_inline(
        printing.dump(fx.GraphModule(torch.nn.Module(), nodes)),
        """\
     condition = input
     _assert_scalar_default = aten._assert_scalar(condition)
     return ()""",
    )
