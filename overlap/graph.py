"""Typed access to an FX graph: phase, tag, fake value, source line. The only module that touches
`node.meta`.

Two places carry our facts. `gm.meta["overlap_phase"]` says how far the graph has come. A node's
`Tag` lives in `node.meta["custom"]["overlap"]`, because `custom` is the one key that AOTAutograd
carries over to the forward and backward graphs it derives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.utils.checkpoint import CheckpointPolicy

from overlap.errors import ConfigError

_TAG_KEY = "overlap"
_PHASE_KEY = "overlap_phase"
REGION_KEY = "overlap_region"
_VALUE_KEYS = ("val", "example_value", "tensor_meta", "unbacked_bindings", "eager_input_vals")


class Phase(enum.IntEnum):
    """How far a graph has come; each phase only adds rules (see `overlap.verify`)."""

    FORWARD = 0
    JOINT = 1
    NORMALIZED = 2
    SCHEDULED = 3
    LEGAL = 4


@dataclasses.dataclass(frozen=True)
class Tag:
    """What `overlap` knows about a node beyond what the node itself says.

    slice: index of the slice that the node belongs to, None for un-sliced.
    region: name of the sliced region, "" outside any.
    stream: stream by name, "" for the default one.
    """

    slice: int | None = None
    region: str = ""
    stream: str = ""


def phase_of(gm: fx.GraphModule) -> Phase:
    return gm.meta.get(_PHASE_KEY, Phase.FORWARD)


def set_phase(gm: fx.GraphModule, phase: Phase) -> None:
    gm.meta[_PHASE_KEY] = phase


def tag_of(node: fx.Node) -> Tag:
    raw = (node.meta.get("custom") or {}).get(_TAG_KEY)
    return Tag(**raw) if raw else Tag()


def set_tag(node: fx.Node, tag: Tag) -> None:
    """Stored as a dict of the fields that are set, so that the metadata stays plain data."""
    default = Tag()
    raw = {k: v for k, v in dataclasses.asdict(tag).items() if v != getattr(default, k)}
    custom = {k: v for k, v in (node.meta.get("custom") or {}).items() if k != _TAG_KEY}
    node.meta["custom"] = custom | ({_TAG_KEY: raw} if raw else {})


def annotate(node: fx.Node, key: str, value: Any) -> None:
    """Note a plain value that travels with the node, also through AOTAutograd."""
    node.meta["custom"] = (node.meta.get("custom") or {}) | {key: value}


def annotation(node: fx.Node, key: str) -> Any:
    return (node.meta.get("custom") or {}).get(key)


def fake_value(node: fx.Node) -> Any:
    """The fake tensor, SymInt or nested structure that the node stands for; None if unknown."""
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def set_fake_value(node: fx.Node, value: Any) -> None:
    node.meta["val"] = value
    if isinstance(value, torch.Tensor):
        node.meta["tensor_meta"] = _extract_tensor_metadata(value)


def copy_type(source: fx.Node, target: fx.Node, value: Any) -> None:
    """Record a fake value of the very type of that of `source`."""
    target.meta["val"] = value
    if "tensor_meta" in source.meta:
        target.meta["tensor_meta"] = source.meta["tensor_meta"]


def binds_sizes(node: fx.Node) -> bool:
    """Whether sizes of the result depend on data, and are known once the node has run."""
    return bool(node.meta.get("unbacked_bindings"))


def copy_facts(source: fx.Node, target: fx.Node) -> None:
    """Give `target` what is known about `source`: origin, tags, policies; not its value."""
    for key, value in source.meta.items():
        if key not in _VALUE_KEYS:
            target.meta.setdefault(key, value)


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or node.meta.get(
        "autograd_backward", False
    )


def recompute_policy(node: fx.Node) -> CheckpointPolicy | None:
    return node.meta.get("recompute")


def set_recompute_policy(node: fx.Node, policy: CheckpointPolicy, region_id: int = 0) -> None:
    """Tag a node for the partitioner; `region_id` numbers the checkpoint that it came from."""
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = region_id


def stack_trace(node: fx.Node) -> str:
    return node.meta.get("stack_trace") or ""


ASSERTIONS = (torch.ops.aten._assert_scalar, torch.ops.aten._assert_async)
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(node: fx.Node) -> str:
    """The user's line behind a node as `file.py:88`, without folders; "" if unknown. Frames inside
    torch are skipped: the line that called them is the user's."""
    frames = _FRAME.findall(stack_trace(node))
    own = [frame for frame in frames if not frame[0].startswith(_TORCH_FOLDER)]
    if not frames:
        return ""
    file, line = (own or frames)[-1]
    return f"{os.path.basename(file)}:{line}"


def module_path(node: fx.Node) -> str:
    """The innermost module that a node came from, as `layers.0.moe`, and in a region that the user
    named, as `layers.0.moe:experts`; "" if unknown."""
    name = annotation(node, REGION_KEY) or "" if node.op != "placeholder" else ""
    return ":".join(part for part in (_module(node), name) if part)


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    return _plain_path(next(reversed(stack.values()))[0])


def state_path(placeholder: fx.Node) -> str:
    """The parameter or buffer behind an input, as `layers.0.norm.weight`; "" if it is none."""
    if not is_module_state(placeholder):
        return ""
    source = getattr(placeholder, "_dynamo_source", None)
    return _plain_path(source.name) if source is not None else ""


def _plain_path(raw: str) -> str:
    path = re.sub(r"^L\['self'\]\.?|^L\['\w+'\]\.?", "", raw)
    path = re.sub(r"_(?:modules|parameters|buffers)\['(\w+)'\]", r"\1", path)
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    return path.replace("..", ".").strip(".")


class Renumbering:
    """Other indices of the modules of one list, for nodes that stand for modules further down it.

    path: of the list, as `model.layers`; first: the index from which on modules are renumbered.
    """

    def __init__(self, path: str, first: int) -> None:
        separator = r"\W+(?:_modules\W+)?"
        names = separator.join(map(re.escape, path.split(".")))
        self._index = re.compile(rf"(\b{names}{separator})(\d+)\b")
        self._first = first
        self._known: dict[tuple[int, int], dict[str, Any]] = {}

    def apply(self, node: fx.Node, shift: int) -> None:
        """Let `node` come from modules `shift` further down the list."""
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            stack = node.meta.get(key)
            if stack and shift:
                known = (id(stack), shift)
                if known not in self._known:
                    self._known[known] = {
                        name: (self._shifted(path, shift), *rest)
                        for name, (path, *rest) in stack.items()
                    }
                node.meta[key] = self._known[known]

    def _shifted(self, path: str, shift: int) -> str:
        def shifted(match: re.Match[str]) -> str:
            index = int(match[2])
            return match[1] + str(index + shift if index >= self._first else index)

        return self._index.sub(shifted, path, count=1)


def is_module_state(placeholder: fx.Node) -> bool:
    """Whether a Dynamo placeholder is a parameter or buffer rather than data. Names are unreliable
    (they follow the user's argument names); the guard source says it."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        grapharg = placeholder.meta.get("grapharg")
        source = getattr(grapharg, "source", None)
    return "NNModuleSource" in repr(source)


def copy_source(source: fx.Node, target: fx.Node) -> None:
    """Carry the Dynamo guard source, a node attribute that copies lose, and what Dynamo knows of
    the value, to another placeholder."""
    if hasattr(source, "_dynamo_source"):
        target._dynamo_source = source._dynamo_source  # pyright: ignore[reportAttributeAccessIssue]
    for key in ("grapharg", "example_value"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def requires_gradient(placeholder: fx.Node) -> bool:
    """Whether a gradient is asked for; what a trace records of an input itself does not say."""
    value = placeholder.meta.get("example_value")
    value = fake_value(placeholder) if value is None else value
    return isinstance(value, torch.Tensor) and value.requires_grad


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors inside a fake value or inside arguments, in order."""
    match value:
        case torch.Tensor():
            yield value
        case list() | tuple():
            for item in value:
                yield from tensors_of(item)
        case dict():
            yield from tensors_of(list(value.values()))


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors share if and only if they lie in one storage."""
    return tensor.untyped_storage()._cdata


def storages_of(node: fx.Node) -> list[int]:
    """The storages of a node's tensors, in order."""
    return [storage_of(tensor) for tensor in tensors_of(fake_value(node))]


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def output_node(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def is_call(node: fx.Node, *packets: Any) -> bool:
    """Whether `node` calls an overload of one of the op packets (or one of the functions)."""
    if node.op != "call_function":
        return False
    return node.target in packets or getattr(node.target, "overloadpacket", None) in packets


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a call advances a random-number generator. Attention and dropout are marked as if
    they did, and do not where the probability is 0 or they are not training."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    defaults = {a.name: a.default_value for a in target._schema.arguments}
    for name, idle in (("dropout_p", 0.0), ("p", 0.0), ("train", False)):
        if name in names and given.get(name, defaults[name]) == idle:
            return False
    return True


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a call, as plain values: fx types them too widely to use."""
    return node.args


def operator(op: Any) -> Any:
    """`op` if a node can call it: an operator, an overload of one, or a function.

    Raises ConfigError for what wraps an operator, such as what torch.library.custom_op returns.
    """
    if isinstance(op, torch._ops.OperatorBase | torch._ops.OpOverloadPacket) or (
        inspect.isroutine(op)
    ):
        return op
    raise ConfigError(
        f"expected an operator such as torch.ops.my_library.my_op, found a {type(op).__name__}; "
        "name the operator by its library"
    )


def schemas(packet: Any) -> list[Any]:
    """The schemas of an operator's overloads."""
    return [getattr(packet, name)._schema for name in packet.overloads()]


def schema_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by schema name, with defaults; by position for plain functions."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(i): arg for i, arg in enumerate(node.args)} | dict(node.kwargs)
    arguments: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(node.args):
            arguments[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            arguments[argument.name] = node.kwargs[argument.name]
        else:
            arguments[argument.name] = argument.default_value
    return arguments


def arguments_with(node: fx.Node, new: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with some of them, by schema name, replaced where the call has
    them."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if not new:
        return tuple(args), kwargs
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    for name, value in new.items():
        at = names.index(name)
        if at < len(args):
            args[at] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs


def packet_of(node: fx.Node) -> Any:
    """The operator that a node calls, whatever the overload; the function itself for others."""
    return getattr(node.target, "overloadpacket", node.target)


def reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes of `graph` in `order`, which names every node once."""
    cursor = graph._root
    for node in order:
        cursor.append(node)
        cursor = node


class Snapshot:
    """A graph as it is now, cheap to take: to compare with, and to build again, later on."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._nodes = {
            node: (node.op, node.target, node.args, node.kwargs, fake_value(node), dict(node.meta))
            for node in gm.graph.nodes
        }

    def has_same_nodes(self, gm: fx.GraphModule, in_order: bool) -> bool:
        """Whether `gm` is known to have the very nodes, each with the very call and value; False
        may also be said of nodes that were made again."""
        nodes = list(gm.graph.nodes)
        is_same = list(self._nodes) == nodes if in_order else self._nodes.keys() == set(nodes)
        return is_same and all(
            a is b
            for node in nodes
            for a, b in zip(
                self._nodes[node],
                (node.op, node.target, node.args, node.kwargs, fake_value(node)),
                strict=False,
            )
        )

    def restored(self) -> fx.GraphModule:
        """The graph as it was, of nodes of its own."""
        copy = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node, (op, target, args, kwargs, _, meta) in self._nodes.items():
            args, kwargs = fx.map_arg((args, kwargs), copies.__getitem__)  # pyright: ignore
            copies[node] = copy.create_node(op, target, args, kwargs, node.name, node.type)
            copies[node].meta = meta
        return fx.GraphModule(self._gm, copy)


def infer_fake_value(node: fx.Node) -> None:
    """Compute and record the fake value of a new call from those of its operands."""
    values = fx.map_arg((node.args, node.kwargs), fake_value)
    found = (t.fake_mode for t in tensors_of(values) if isinstance(t, FakeTensor))
    mode = next(found, None)
    args, kwargs = values  # pyright: ignore[reportGeneralTypeIssues]
    with mode or contextlib.nullcontext(), torch.no_grad():
        set_fake_value(node, node.target(*args, **kwargs))  # pyright: ignore[reportCallIssue]


def call_like(
    like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """A new call where the graph inserts now, with the facts of `like` and its own fake value."""
    node = like.graph.call_function(target, args, dict(kwargs or {}))
    copy_facts(like, node)
    infer_fake_value(node)
    return node


def propagate_fake_values(gm: fx.GraphModule) -> None:
    """Record the fake value of every node by running the graph on the fake values of its inputs.

    Mode switches in the graph take effect, and are undone at the end. Data-dependent sizes get
    fresh symbols.
    """
    inputs = [fake_value(node) for node in placeholders(gm.graph)]
    mode = next(t.fake_mode for t in inputs if isinstance(t, FakeTensor))
    shapes = mode.shape_env
    fresh = shapes.ignore_fresh_unbacked_symbols() if shapes else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), mode, fresh:
        _FakeRun(gm).run(*inputs)


class _FakeRun(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "output"):
            set_fake_value(n, value)
        return value


def is_size(node: fx.Node) -> bool:
    """Whether the node stands for a number that the host knows."""
    return isinstance(fake_value(node), int | torch.SymInt)


def is_common_size(node: fx.Node) -> bool:
    """Whether the node stands for a size that is computed from sizes of the inputs alone."""
    value = fake_value(node)
    if isinstance(value, int):
        return True
    return isinstance(value, torch.SymInt) and not free_unbacked_symbols(value)


def is_same_size(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be equal, without a guard."""
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int) and one == other
    return one.node.expr == other.node.expr


def is_same_shape(one: Sequence[int | torch.SymInt], other: Sequence[int | torch.SymInt]) -> bool:
    return len(one) == len(other) and all(map(is_same_size, one, other))


def has_type_of(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes stand for tensors of one dtype and shape, without a guard."""
    one, two = fake_value(node), fake_value(other)
    return one.dtype == two.dtype and is_same_shape(one.shape, two.shape)
