"""The textual dump of a graph: the golden format, and what a person reads to judge a schedule.

One node a line, `GUTTER NAME: TYPE = CALL  # TAGS`. The gutter has a lane for each collective in
flight: `,` starts, `|` in flight, `'` waits. A line with a `|` beside it is overlapped.

    ,    all_to_all: f32[8,4] = all_to_all(x0) group=ep
    |    mm: f32[8,4] = aten.mm(x1, w)  # slice=1
    '    wait: f32[8,4] = wait(all_to_all)
         relu: f32[8,4] = aten.relu(wait)  # slice=0

The text depends on the graph alone: symbols are renumbered in order of appearance, devices lose
their index, and there is no address, path or set order in it. Two processes print the same.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import sympy
import torch
from torch import fx

from overlap import collectives, graph

MIN_LANES = 4
_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_SYMBOL = re.compile(r"([A-Za-z_]+?)(\d+)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Names(Protocol):
    """How the symbols in a size print."""

    def show(self, value: Any) -> str: ...


class _OwnNames:
    """Symbols print under the names that the shape environment gave them."""

    def __init__(self) -> None:
        self._shown: dict[Any, str] = {}

    def show(self, value: Any) -> str:
        expr = value.node.expr
        if expr not in self._shown:
            self._shown[expr] = str(expr)
        return self._shown[expr]


class _Uncached:
    def show(self, value: Any) -> str:
        return str(value)


OWN_NAMES: Names = _Uncached()


def dump(gm: fx.GraphModule) -> str:
    """The graph as text, the bodies that it calls below it."""
    return _dump(gm, _Symbols(), indent="")


def dump_lines(gm: fx.GraphModule) -> list[str]:
    """The lines of the dump that stand for the graph's own nodes, one each, in order."""
    return _node_lines(gm, _Symbols())


def dump_diff(before: str, after: str) -> str:
    """What changed between two dumps, as a unified diff without file names; "" if nothing did."""
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=3)
    kept = ["..." if line.startswith("@@") else line for line in list(diff)[2:]]
    return "\n".join(kept[1:])


def lines(gm: fx.GraphModule) -> list[str]:
    """What each node computes, in order: no gutter, no tags, and symbols under their own names, so
    that moving or tagging a node changes no line."""
    symbols = _OwnNames()
    return [format_node(node, symbols) for node in gm.graph.nodes]


def describe(node: fx.Node) -> str:
    """One node as its line of the dump shows it, symbols under their own names."""
    return format_node(node) + _tags(node)


@dataclasses.dataclass
class Lanes:
    """The gutter: which lanes are in flight, the lowest free one taken first."""

    taken: list[fx.Node | None] = dataclasses.field(default_factory=list[fx.Node | None])

    def next(self, node: fx.Node) -> str:
        """The gutter beside `node`, which comes next in the order."""
        marks = ["|" if start else " " for start in self.taken]
        if collectives.is_start(node):
            lane = self.taken.index(None) if None in self.taken else len(self.taken)
            self.taken[lane : lane + 1] = [node]
            marks[lane : lane + 1] = [","]
        elif collectives.is_wait(node) and (start := collectives.start_of(node)) in self.taken:
            lane = self.taken.index(start)
            self.taken[lane] = None
            marks[lane] = "'"
        return "".join(marks).rstrip()


def gutters(nodes: Sequence[fx.Node]) -> list[str]:
    """The gutter beside each node, padded to one width."""
    lanes = Lanes()
    marks = [lanes.next(node) for node in nodes]
    width = max(MIN_LANES, len(lanes.taken)) + 1
    return [mark.ljust(width) for mark in marks]


class _Symbols:
    """Renumbers the symbols of sizes in order of appearance: s77 is s0 if it is met first."""

    def __init__(self) -> None:
        self._renamed: dict[sympy.Symbol, sympy.Symbol] = {}
        self._counts: dict[str, int] = {}
        self._shown: dict[Any, str] = {}

    def show(self, value: Any) -> str:
        expr: Any = value.node.expr
        if expr not in self._shown:
            for symbol in sorted(expr.free_symbols, key=_symbol_key):
                self._rename(symbol)
            self._shown[expr] = str(expr.xreplace(self._renamed))
        return self._shown[expr]

    def _rename(self, symbol: sympy.Symbol) -> None:
        match = _SYMBOL.fullmatch(symbol.name)
        if symbol in self._renamed or not match:
            return
        prefix = match[1]
        number = self._counts.get(prefix, 0)
        self._counts[prefix] = number + 1
        self._renamed[symbol] = sympy.Symbol(f"{prefix}{number}", **symbol.assumptions0)


def _symbol_key(symbol: sympy.Symbol) -> tuple[str, int]:
    match = _SYMBOL.fullmatch(symbol.name)
    return (match[1], int(match[2])) if match else (symbol.name, -1)


def _dump(gm: fx.GraphModule, symbols: _Symbols, indent: str) -> str:
    text = [indent + line for line in _node_lines(gm, symbols)]
    for name, body in _bodies(gm):
        text += [f"{indent}{name}:", _dump(body, symbols, indent + "    ")]
    return "\n".join(text)


def _node_lines(gm: fx.GraphModule, symbols: _Symbols) -> list[str]:
    nodes = list(gm.graph.nodes)
    return [
        f"{gutter}{format_node(node, symbols)}{_tags(node)}"
        for gutter, node in zip(gutters(nodes), nodes, strict=True)
    ]


def _bodies(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graphs that higher-order operators call, in order of first use."""
    names = dict.fromkeys(
        str(n.target) for n in gm.graph.nodes if n.op in ("get_attr", "call_module")
    )
    for name in names:
        body = _attribute(gm, name)
        if isinstance(body, fx.GraphModule):
            yield name, body


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    value: Any = gm
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def format_node(node: fx.Node, symbols: Names = OWN_NAMES) -> str:
    """`NAME: TYPE = CALL` of one node; an output is `return (a, b)`."""
    if node.op == "output":
        return f"return {format_argument(node.args[0], symbols)}"
    kind = format_type(graph.fake_value(node), symbols)
    return f"{node.name}{kind and ': '}{kind} = {_call(node, symbols)}"


def format_type(value: Any, symbols: Names = OWN_NAMES) -> str:
    """`f32[8,s0]` for a tensor, `int(2*s0)` for a symbolic number, "" for an unknown value."""
    match value:
        case torch.Tensor():
            sizes = ",".join(format_argument(size, symbols) for size in value.shape)
            return f"{_DTYPES.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{sizes}]"
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return f"{type(value).__name__.removeprefix('Sym').lower()}({symbols.show(value)})"
        case bool() | int() | float():
            return f"{type(value).__name__}({value})"
        case list() | tuple():
            return f"({', '.join(format_type(item, symbols) or 'None' for item in value)})"
        case _:
            return ""


def format_argument(value: Any, symbols: Names = OWN_NAMES) -> str:
    """An argument as the dump shows it: nodes by name, constants without addresses or indices."""
    match value:
        case fx.Node():
            return value.name
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return symbols.show(value)
        case list():
            return f"[{', '.join(format_argument(item, symbols) for item in value)}]"
        case tuple():
            items = [format_argument(item, symbols) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        case dict():
            items = [f"{key!r}: {format_argument(item, symbols)}" for key, item in value.items()]
            return f"{{{', '.join(items)}}}"
        case slice():
            parts = (value.start, value.stop, value.step)
            shown = ["" if part is None else format_argument(part, symbols) for part in parts]
            return ":".join(shown if shown[2] else shown[:2])
        case torch.dtype():
            return _DTYPES.get(value, str(value).removeprefix("torch."))
        case torch.device():
            return value.type
        case torch.layout() | torch.memory_format():
            return str(value).removeprefix("torch.")
        case enum.Enum():
            return value.name
        case _ if value is ...:
            return "..."
        case None | bool() | int() | float() | complex() | str():
            return repr(value)
        case _ if callable(value):
            return function_name(value)
        case _:
            return type(value).__name__


def _call(node: fx.Node, symbols: Names) -> str:
    args = [format_argument(arg, symbols) for arg in node.args]
    args += [f"{key}={format_argument(arg, symbols)}" for key, arg in node.kwargs.items()]
    match node.op:
        case "placeholder":
            return "input"
        case "get_attr":
            return f"self.{node.target}"
        case "call_module":
            return f"self.{node.target}({', '.join(args)})"
        case "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:])})"
        case _:
            pass
    if collectives.is_start(node):
        return _start(node, symbols)
    if collectives.is_wait(node):
        return f"wait({', '.join(args)})"
    if graph.is_call(node, *graph.ASSERTIONS):
        args = args[:1]  # the rest is a message that spells out the condition
    name = function_name(node.target)
    if name == "operator.getitem":
        is_tuple = isinstance(node.args[1], tuple)
        return f"{args[0]}[{args[1][1:-1] if is_tuple else args[1]}]"
    return f"{name}({', '.join(args)})"


def _start(node: fx.Node, symbols: Names) -> str:
    """A start shows its kind and its group by name, wherever its operator takes the group."""
    group = collectives.group_of(node)
    named = [("", arg) for arg in node.args]
    named += [(f"{key}=", arg) for key, arg in node.kwargs.items()]
    places = [i for i, (_, arg) in enumerate(named) if str(arg) == group]
    if places:
        del named[places[-1]]
    args = [prefix + format_argument(arg, symbols) for prefix, arg in named]
    target: Any = node.target
    in_place = "_" if target._schema.is_mutable else ""
    other = "" if target.namespace == "_c10d_functional" else f" by={function_name(target)}"
    return f"{collectives.kind_of(node).value}{in_place}({', '.join(args)}) group={group}{other}"


def function_name(target: Any) -> str:
    """`aten.mm`, `aten.add.Tensor`, `operator.mul`, `torch.sym_sum`."""
    match target:
        case torch._ops.OpOverload():
            return str(target).removesuffix(".default")
        case torch._ops.HigherOrderOperator():
            return f"higher_order.{target.name()}"
        case _:
            module = getattr(target, "__module__", None) or ""
            name = getattr(target, "__qualname__", None) or _ADDRESS.sub("", str(target))
            name = name.removeprefix("_VariableFunctionsClass.")
            module = "operator" if module == "_operator" else module
            return f"{module}.{name}" if module not in ("", "builtins") else name


def _tags(node: fx.Node) -> str:
    tag = graph.tag_of(node)
    shown = [f"slice={tag.slice}"] if tag.slice is not None else []
    shown += [f"region={tag.region}"] if tag.region else []
    shown += [f"stream={tag.stream}"] if tag.stream else []
    return f"  # {' '.join(shown)}" if shown else ""
