"""TorchTitan's EP overlap (`experiments/graph_trainer`, 0.3) on a program of ours.

Strategy `eager`: the forward of every module of one name, a transformer block or its MoE, runs on
the two halves of the batch; the whole step is traced, and a pass orders the two chunks of each
module around their all-to-alls. Strategy `graph` traces the module as it is and has a pass chunk
the trace.

    annotate, chunk forwards ─▶ TorchTitan's tracer ─▶ its passes ─▶ the step as one graph

The passes know modules by name (`layers.*`, `layers.*.moe`) and exchanges by annotations that
TorchTitan's own dispatcher makes; `_as_named` and `_annotated` give a model of ours both. Nothing
of TorchTitan is changed, but that Triton kernels which it imports and no pass uses may be missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed import _functional_collectives as funcol
from torch.fx.graph import _BoxedCodeGen
from torch.fx.traceback import annotate_fn

from models import DeepSeekV3, LossModel, MoE

BLOCK, MOE = "layers.*", "layers.*.moe"
INSTALL = (
    "pip install --no-deps torchtitan==0.3.0, then torchdata torch_checkpointing "
    '"datasets<4.8" tokenizers safetensors tyro tensorboard wandb einops pillow '
    "spmd_types==0.2.3"
)
_PACKAGE = "torchtitan.experiments.graph_trainer"
_PARTS = (
    "common_utils",
    "configs",
    "ep_chunk_pass",
    "ep_eager_chunk",
    "ep_overlap_pass",
    "ep_pass_utils",
    "make_fx_tracer",
    "passes",
    "registry",
)
_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


@functools.cache
def why_left_out() -> str:
    """Why TorchTitan cannot be imported; "" if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name in _PARTS:
                _part(name)
        except ImportError as error:
            return str(error)
    return ""


def _part(name: str) -> Any:
    """A module of TorchTitan's graph trainer."""
    if importlib.util.find_spec("triton") is None:
        sys.modules.setdefault(_KERNELS, mock.MagicMock())
    return importlib.import_module(f"{_PACKAGE}.{name}")


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A training step as one graph: weights, buffers and batch in, loss and gradients out.

    seconds: what TorchTitan's passes took.
    """

    module: nn.Module
    gm: fx.GraphModule
    seconds: float

    def run(self, *batch: Tensor) -> Tensor:
        """Leaves the gradients in the module's parameters; returns the loss."""
        state, _ = _part("make_fx_tracer").extract_train_state(self.module)
        with torch.no_grad():
            loss, *gradients = self.gm.forward([*state.values(), *batch])
        for parameter, gradient in zip(self.module.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return loss


def trace(
    module: nn.Module, batch: tuple[Tensor, ...], root: str, strategy: str = "eager"
) -> TracedStep:
    """`module(*batch)`, a loss, and its gradients, after TorchTitan's passes, which overlap the
    modules called `root`. `module` is changed for good. Raises what TorchTitan raises."""
    config = _config(root, strategy)
    named = module.model if isinstance(module, LossModel) else module
    with _as_named(named, root):
        _part("common_utils").annotate_module_fqns(named)
        _part("ep_eager_chunk").maybe_apply_ep_overlap_eager_chunking(named, config)

    def step(*batch: Tensor) -> tuple[Tensor, ...]:
        loss = module(*batch)
        return loss, *torch.autograd.grad(loss, list(module.parameters()))

    def mark_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for prepare in _part("registry").TRACE_INPUT_PREPARERS.values():
            prepare(config, args, kwargs)

    tracer = _part("make_fx_tracer").minimal_fx_tracer(
        step, module=module, prepare_inputs=mark_inputs
    )
    with _annotated():
        traced = tracer(*batch)
    gm, began = traced.gm, time.perf_counter()
    for run_pass in _passes(root, strategy, traced.num_static_inputs):
        gm = run_pass(gm, traced.example_inputs)
    seconds = time.perf_counter() - began
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return TracedStep(module, gm, seconds)


def chunked(module: nn.Module) -> nn.Module:
    """`module`, one tensor in, as the MoE of a layer that strategy `eager` has chunked."""
    layer = nn.Module()
    layer.moe = module
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    _part("ep_eager_chunk").maybe_apply_ep_overlap_eager_chunking(model, _config(MOE, "eager"))
    return module


def _config(root: str, strategy: str) -> Any:
    configs = _part("configs")
    overlap = configs.EpOverlapConfig(enabled=True, strategy=strategy, module_fqn=root)
    return configs.GraphTrainerCompileConfig(enable=True, ep_overlap=overlap)


def _passes(root: str, strategy: str, num_static: int) -> list[Callable[..., fx.GraphModule]]:
    """The passes of its default pipeline that an EP overlap needs, in its order."""
    passes = _part("passes")
    if strategy == "eager":
        chunk = [_part("ep_eager_chunk").populate_eager_chunk_metadata_pass]
    else:
        chunking = _part("ep_chunk_pass")
        chunk = [
            functools.partial(chunking.populate_chunk_dim_metadata_pass, mode="batch"),
            functools.partial(
                chunking.ep_overlap_chunk_pass,
                mode="batch",
                module_pattern=root,
                num_static_inputs=num_static,
            ),
        ]
    schedule = functools.partial(
        _part("ep_overlap_pass").ep_overlap_schedule_pass,
        module_pattern=root,
        pair_first_token_exchange=root == MOE,
    )
    return [
        passes.eliminate_dead_code_pass,
        passes.canonicalize_graph_pass,
        *chunk,
        passes.eliminate_dead_code_pass,
        schedule,
        _part("ep_pass_utils").concretize_ep_chunk_symbolic_shapes_pass,
    ]


@contextlib.contextmanager
def _annotated() -> Generator[None]:
    """What is traced meanwhile says which all-to-alls move tokens, and which their counts."""
    names = _part("common_utils")
    tokens = {names._EP_TOKEN_EXCHANGE: "dispatch"}  # a combine too: the label is only printed
    counts = {"EP": "dispatch", names._EP_TOKEN_COUNT_EXCHANGE: "dispatch"}
    of_tokens, of_counts = funcol.all_to_all_single_autograd, funcol.all_to_all_single
    with (
        mock.patch.object(funcol, "all_to_all_single_autograd", annotate_fn(tokens)(of_tokens)),
        mock.patch.object(funcol, "all_to_all_single", annotate_fn(counts)(of_counts)),
    ):
        yield


@contextlib.contextmanager
def _as_named(model: nn.Module, root: str) -> Generator[None]:
    """A DeepSeek-V3 of ours under the names and signatures that TorchTitan's chunking knows, while
    that wraps the forwards. Dense blocks stay whole, as TorchTitan's do."""
    if not isinstance(model, DeepSeekV3):
        yield
        return
    forwards = [layer.forward for layer in model.layers]
    for layer in model.layers:
        if isinstance(layer.ffn, MoE):
            layer.moe = layer._modules.pop("ffn")
            object.__setattr__(layer, "ffn", layer.moe)
        if root == BLOCK:
            layer.forward = functools.partial(_with_table, model, layer.forward)
    yield
    for layer, forward in zip(model.layers, forwards, strict=True):
        if not isinstance(layer.ffn, MoE):
            layer.forward = forward
        elif root == BLOCK:
            layer.forward = functools.partial(_without_table, layer.forward)


def _with_table(model: DeepSeekV3, forward: Callable[..., Tensor], x_BSD: Tensor) -> Tensor:
    return forward(x_BSD, model.rope_2SR[:, : x_BSD.shape[1]])


def _without_table(forward: Callable[..., Tensor], x_BSD: Tensor, rope_2SR: Tensor) -> Tensor:
    return forward(x_BSD)
