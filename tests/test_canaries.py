"""Private torch interfaces that `overlap` builds on: each fails here, clearly, when torch changes."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from functorch.compile import default_partition, make_boxed_func
from torch import fx
from torch._dynamo import exc
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.output_code import CompiledFxGraph
from torch.distributed import distributed_c10d as c10d
from torch.fx import traceback
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def test_the_version_is_supported() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (major, minor) >= (2, 13)


def test_dynamo_lets_a_backend_restart_the_capture() -> None:
    assert issubclass(exc.TensorifyScalarRestartAnalysis, exc.RestartAnalysis)
    assert "restart_reason" in inspect.signature(exc.RestartAnalysis.__init__).parameters


def test_dynamo_records_which_dims_were_marked() -> None:
    x = torch.zeros(4)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    assert x._dynamo_weak_dynamic_indices == {0}
    y = torch.zeros(4)
    torch._dynamo.mark_static(y, 0)
    assert 0 in y._dynamo_static_indices


def test_the_dynamo_flags_exist() -> None:
    assert hasattr(torch._dynamo.config, "capture_scalar_outputs")
    assert hasattr(torch._dynamo.config, "capture_dynamic_output_shape_ops")


def test_aot_autograd_hands_out_the_joint_graph() -> None:
    assert "num_fwd_outputs" in inspect.signature(default_partition).parameters
    seen: list[str] = []

    def partition(joint: fx.GraphModule, inputs: object, **options: object) -> object:
        seen.extend(node.name for node in joint.graph.nodes if node.op == "placeholder")
        return default_partition(joint, inputs, **options)

    step = torch.compile(
        lambda x: x.sin().sum(),
        backend=aot_autograd(
            fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition
        ),
    )
    step(torch.ones(2, requires_grad=True)).backward()
    assert seen == ["primals_1", "tangents_1"]


def test_custom_metadata_reaches_traced_nodes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with traceback.annotate({"mark": 1}):
            return x.sin()

    with traceback.preserve_node_meta():
        gm = fx.experimental.proxy_tensor.make_fx(function)(torch.zeros(2))
    (sin,) = [node for node in gm.graph.nodes if node.name == "sin"]
    assert sin.meta["custom"]["mark"] == 1


def test_inductor_compiles_a_graph_of_sizes_without_hint() -> None:
    """What `overlap.inner.inductor` builds on; tests/test_inductor.py runs it."""
    taken = inspect.signature(compile_fx.compile_fx_inner).parameters
    assert list(taken)[:2] == ["gm", "example_inputs"]
    assert "user_visible_output_idxs" in inspect.getsource(compile_fx)
    assert "source_code" in CompiledFxGraph.__annotations__
    assert select_decomp_table()
    with ShapeEnv().ignore_fresh_unbacked_symbols():
        assert not ShapeEnv().create_unbacked_symint().node.has_hint()


def test_functional_collectives_keep_their_schemas() -> None:
    c10d = torch.ops._c10d_functional
    names = [argument.name for argument in c10d.all_to_all_single.default._schema.arguments]
    assert names == ["input", "output_split_sizes", "input_split_sizes", "group_name"]
    assert [a.name for a in c10d.wait_tensor.default._schema.arguments] == ["tensor"]


def test_boxed_code_takes_one_list_and_empties_it() -> None:
    gm = fx.symbolic_trace(lambda a, b: (a + b,))
    gm.graph.set_codegen(fx.graph._BoxedCodeGen())
    gm.recompile()
    inputs = [1, 2]
    assert gm.forward(inputs) == (3,)
    assert inputs == []


def test_the_default_store_keeps_the_first_value_for_all_who_ask() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        shared = c10d._get_default_store()
        assert shared.compare_set("key", "", "first") == b"first"
        assert shared.compare_set("key", "", "second") == b"first"
    finally:
        dist.destroy_process_group()
