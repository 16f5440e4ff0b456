"""Equal layers traced once: what is unrolled is what is traced in full."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import default_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from models import DeepSeekV3, DeepSeekV3Config, LossModel
from overlap import graph, printing, repeat, report, shallow
from overlap.config import Config
from overlap.errors import ConfigError, PassError
from overlap.runtime import fake

WIDTH = 8
NUM_TENSORS = 4  # of a block


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = scale

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.down(torch.relu(self.up(self.norm(x))) * self.scale)
        return x + h * mask[0]


def plain(stack: Stack, x: Tensor) -> Tensor:
    mask = stack.mask * 2
    for layer in stack.layers:
        x = layer(x, mask)
    return x


def collecting(stack: Stack, x: Tensor) -> Tensor:
    """Reads the result of every layer at the end."""
    mask, seen = stack.mask * 2, [x]
    for layer in stack.layers:
        seen.append(layer(seen[-1], mask))
    return torch.stack(seen[1:]).sum(0)


def alternating(stack: Stack, x: Tensor) -> Tensor:
    for i, layer in enumerate(stack.layers):
        x = layer(x, stack.mask if i % 2 else stack.other)
    return x


def counting(stack: Stack, x: Tensor) -> Tensor:
    return plain(stack, x) / len(stack.layers)


class Stack(nn.Module):
    mask: Tensor
    other: Tensor

    def __init__(
        self, num_layers: int, run: Callable[[Stack, Tensor], Tensor] = plain, scales: Any = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            Block(*[scales[i]] if scales else []) for i in range(num_layers)
        )
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("mask", torch.rand(1, WIDTH))
        self.register_buffer("other", torch.rand(1, WIDTH))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self, self.first(x))).square().mean()


@dataclasses.dataclass
class Parts:
    """Forward and backward graph of a step, the inputs by the names of the module's tensors."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_results: int
    inputs: list[Any]


def parts_of(model: nn.Module, x: Tensor) -> Parts:
    found: list[Any] = []

    def partition(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        parts = default_partition(gm, inputs, **options)
        found.extend([*parts, options["num_fwd_outputs"]])
        return parts

    def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
        # A function of its own: `gm.forward` may be one that all lazily compiled modules share.
        return lambda *args: gm(*args)

    def capture(gm: fx.GraphModule, inputs: Any) -> Any:
        given = list(inputs)
        compiled = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(
            gm, inputs
        )
        found.append(given)
        return compiled

    torch.compiler.reset()
    torch.compile(model, backend=capture)(x)
    torch.compiler.reset()
    return Parts(*found)


def unrolled(num_layers: int, extra: int, run: Any = plain) -> Parts:
    parts = parts_of(Stack(num_layers, run), torch.rand(4, WIDTH))
    more = repeat.More(extra, NUM_TENSORS, "layers")
    repeat.unroll(parts.forward, parts.backward, parts.num_results, more)
    return parts


def shape_of(gm: fx.GraphModule) -> list[Any]:
    """The graph without its names: every call, what it reads by position, and its type."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}

    def at(node: fx.Node) -> str:
        return f"%{position[node]}"

    def shown(node: fx.Node) -> tuple[str, ...]:
        args = node.args[:1] if graph.is_call(node, *graph.ASSERTIONS) else node.args  # no message
        reads = repr(fx.map_arg((args, dict(node.kwargs)), at))
        target = printing.function_name(node.target) if node.op == "call_function" else ""
        return node.op, target, reads, repeat.type_of(node)

    return [shown(node) for node in gm.graph.nodes]


@pytest.mark.parametrize("extra", [1, 4])
def test_unrolled_graphs_are_those_traced_in_full(extra: int) -> None:
    short = unrolled(3, extra)
    full = parts_of(Stack(3 + extra), torch.rand(4, WIDTH))
    assert shape_of(short.forward) == shape_of(full.forward)
    assert shape_of(short.backward) == shape_of(full.backward)


def test_calls_come_from_the_modules_of_the_deep_model() -> None:
    short, full = unrolled(3, 2), parts_of(Stack(5), torch.rand(4, WIDTH))
    for mine, its in ((short.forward, full.forward), (short.backward, full.backward)):
        paths = [graph.module_path(node) for node in mine.graph.nodes]
        assert paths == [graph.module_path(node) for node in its.graph.nodes]
        assert "layers.4.up" in paths


def test_unrolled_graphs_compute_what_the_deep_model_does() -> None:
    short = unrolled(3, 3)
    model, x = Stack(6), torch.rand(4, WIDTH)
    full = parts_of(model, x)
    inputs = [x if value.shape == x.shape else value.detach() for value in full.inputs]
    for gm in (short.forward, short.backward):
        gm.recompile()
    loss, *saved = short.forward(*inputs)
    gradients = short.backward(*in_order(short, saved), torch.ones(()))
    model(x).backward()
    expected = [value.grad for value in full.inputs]
    assert torch.equal(loss, model(x))
    assert len(gradients) == len(expected)
    for found, wanted in zip(gradients, expected, strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(found, wanted)


def in_order(parts: Parts, saved: list[Any]) -> list[Any]:
    """What the forward saved, in the order in which the backward takes it."""
    results = list(parts.forward.graph.output_node().args[0])  # pyright: ignore
    by_name = {node.name: value for node, value in zip(results[1:], saved, strict=True)}
    names = [node.name for node in parts.backward.graph.find_nodes(op="placeholder")]
    return [by_name[name] for name in names if not name.startswith("tangents")]


def test_every_layer_has_memory_of_its_own() -> None:
    short, full = unrolled(3, 2), parts_of(Stack(5), torch.rand(4, WIDTH))
    for mine, its in ((short.forward, full.forward), (short.backward, full.backward)):
        assert sharing(mine) == sharing(its)


def sharing(gm: fx.GraphModule) -> list[int]:
    """Per node, the first one that it shares a storage with."""
    first: dict[int, int] = {}
    return [
        first.setdefault(storage, i)
        for i, node in enumerate(gm.graph.nodes)
        for storage in graph.storages_of(node)
    ]


def test_refuses_a_value_that_is_collected_from_every_layer() -> None:
    with pytest.raises(PassError, match="stack reads values of several layers"):
        unrolled(4, 2, collecting)


def test_refuses_layers_that_read_different_values() -> None:
    with pytest.raises(PassError, match="repeat"):
        unrolled(3, 2, alternating)


def test_refuses_a_period_that_is_not_a_layer() -> None:
    parts = parts_of(Stack(4), torch.rand(4, WIDTH))
    more = repeat.More(1, 2 * NUM_TENSORS, "layers")
    with pytest.raises(PassError, match="a layer has 8 inputs, and 4 repeat"):
        repeat.unroll(parts.forward, parts.backward, parts.num_results, more)


def test_refuses_a_graph_that_does_not_repeat() -> None:
    with pytest.raises(PassError, match="repeat"):
        unrolled(1, 2)


# --- the model ------------------------------------------------------------------------------------


def test_finds_equal_layers() -> None:
    run = shallow.longest_run(Stack(8, scales=[1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 1.0]))
    assert run is not None
    assert (run.path, run.first, run.length) == ("layers", 2, 5)


def test_layers_that_share_a_parameter_are_no_run() -> None:
    model = Stack(5)
    blocks: Any = model.layers
    blocks[3].up.weight = blocks[1].up.weight
    assert shallow.longest_run(model) is None


def test_leaves_layers_out_and_puts_them_back() -> None:
    model = Stack(6)
    run = shallow.longest_run(model)
    assert run is not None
    names = list(model.state_dict())
    with shallow.shortened(run):
        assert len(model.layers) == shallow.KEPT
    assert list(model.state_dict()) == names


def test_a_plain_loop_is_uniform() -> None:
    check(plain)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (alternating, "different arguments"),
        (counting, "not called alike"),
        (collecting, "not called alike"),
    ],
)
def test_refuses_layers_that_are_not_called_alike(run: Any, message: str) -> None:
    with pytest.raises(PassError, match=message):
        check(run)


def check(run: Any) -> None:
    model = Stack(6, run)
    found = shallow.longest_run(model)
    assert found is not None
    shallow.check_uniform(model, found, [torch.rand(4, WIDTH)])


# --- a whole compilation --------------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake.world(2):
        yield


def deepseek(num_layers: int) -> tuple[nn.Module, list[Tensor]]:
    config = dataclasses.replace(DeepSeekV3Config.toy(), num_layers=num_layers, num_dense=0)
    tokens = torch.zeros(2, config.max_seq, dtype=torch.int64)
    return LossModel(DeepSeekV3(config, dist.group.WORLD)), [tokens, tokens.clone()]


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("whole_step", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_compilation_is_that_of_the_whole_model(whole_step: bool) -> None:
    config = Config(slices=2, hardware="h100", whole_step=whole_step)
    short = report.compile_repeated(*deepseek(4), config)
    full = report.compile_only(*deepseek(4), config)
    kinds = ["step", "scale"] if whole_step else ["forward", "backward"]
    assert [one.kind for one in short.graphs] == kinds
    num_compiled = 1 if whole_step else 2  # AOTAutograd puts the scaling off
    assert [one.kind for one in full.graphs] == kinds[:num_compiled]
    for mine, its in zip(short.graphs, full.graphs, strict=False):
        assert shape_of(mine.gm) == shape_of(its.gm)
        assert mine.timeline and its.timeline
        assert mine.timeline.makespan_us == its.timeline.makespan_us
        assert mine.timeline.peak_bytes == its.timeline.peak_bytes
        assert unnamed(mine.dump) == unnamed(its.dump)


def unnamed(dump: str) -> list[str]:
    """The lanes and operators of a dump."""
    return [re.sub(r"\w*\d\w*", "*", line.partition("=")[0])[:8] for line in dump.splitlines()]


def test_a_model_on_the_meta_device_is_an_error() -> None:
    with torch.device("meta"):
        model = Stack(5)
    with pytest.raises(ConfigError, match="fake tensors"):
        report.compile_repeated(model, [torch.rand(4, WIDTH)], Config(slices=2))


@pytest.mark.usefixtures("ranks")
def test_a_model_without_equal_layers_is_an_error() -> None:
    with pytest.raises(ConfigError, match="equal layers"):
        report.compile_repeated(*deepseek(3), Config(slices=2, hardware="h100"))
