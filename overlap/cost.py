"""Costs of the nodes of an ATen graph, from fake values and a hardware profile.

A cost table decides the order of collectives, so it has to be the same on every rank. Ranks differ
in their local batch and in how many tokens the router sends where; none of that may show. So a
size is *nominal*: a symbol's value is a constant of this module, never the symbol's hint.

    NOMINAL_BATCH   a symbol that is dimension 0 of graph inputs, and no other dimension
    nominal size    any other symbol that is known before the step runs; the profile gives it
    measured size   instead of both, where a cost table says what it was measured at
    balanced        a symbol that the data decides (`u0`, rows that a router sends): the splits of
                    an all-to-all share its rows evenly, so do the pieces of a split
    skewed          the rows that a rank receives, times what is said of the busiest rank

Work becomes time by a roofline: the larger of flops over the reached peak and bytes moved over the
reached memory bandwidth. Views, scalars and allocation cost nothing. A collective costs a latency
plus its volume over its link.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from overlap import collectives, graph
from overlap.collectives import Kind
from overlap.errors import ConfigError
from overlap.hardware import Profile

NOMINAL_BATCH = 8
NOMINAL_SIZE = 512

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Work:
    """What one node does: floating-point operations, bytes moved, dtype that it computes in."""

    flops: float = 0.0
    num_bytes: float = 0.0
    dtype: torch.dtype = torch.float32

    def us(self, profile: Profile) -> float:
        """Time on one device in microseconds."""
        compute_us = self.flops / profile.flops_per_us(str(self.dtype).removeprefix("torch."))
        return max(compute_us, self.num_bytes / profile.memory_bytes_per_us())


@dataclasses.dataclass(frozen=True)
class NodeCost:
    """What one node costs.

    compute_us: time on the compute queue, or of the host where it reads a device value.
    collective_us: time on its link, for a start; 0 for everything else.
    issue_us: host time to issue a start or a wait, on top of the launch time of any node.
    link: name of the link that a start uses; groups of one link share its rate.
    is_host_read: whether the host blocks here until the device has come this far.
    result_bytes: bytes of each tensor of the result, in order.
    """

    compute_us: float = 0.0
    collective_us: float = 0.0
    link: str = ""
    is_host_read: bool = False
    result_bytes: tuple[int, ...] = ()
    issue_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the costs of a graph's nodes come from, in numbers of nodes.

    measured: the cost table has the call. scaled: it has the operator in other sizes.
    formulas: the operators of the rest, each with its number.
    """

    measured: int = 0
    scaled: int = 0
    formulas: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    def __add__(self, other: Sources) -> Sources:
        formulas = {
            name: self.formulas.get(name, 0) + other.formulas.get(name, 0)
            for name in {**self.formulas, **other.formulas}
        }
        return Sources(self.measured + other.measured, self.scaled + other.scaled, formulas)

    def __str__(self) -> str:
        text = f"{self.measured} nodes measured, {self.scaled} scaled from another size"
        if not self.formulas:
            return text
        names = ", ".join(f"{name} ({count})" for name, count in self.formulas.items())
        return f"{text}, {sum(self.formulas.values())} by formula: {names}"


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of a graph's nodes by name, and the host's time to issue one of them.

    sources: None where no cost table was used.
    """

    nodes: Mapping[str, NodeCost]
    launch_us: float = 0.0
    sources: Sources | None = None

    def of(self, node: fx.Node) -> NodeCost:
        return self.nodes[node.name]


class Sizes:
    """Values of symbolic sizes. Nominal ones are equal on all ranks, whatever their hints are.

    nominal_size: of a symbol that nothing else is said about.
    dims: sizes by dimension of the graph inputs; see `input_dim_of`.
    is_local: the sizes of this rank's own batch instead: for predictions, never for decisions.
    """

    def __init__(
        self,
        nominal_size: int = NOMINAL_SIZE,
        dims: Mapping[int, int] | None = None,
        is_local: bool = False,
    ) -> None:
        self._nominal_size = nominal_size
        self._dims = {0: NOMINAL_BATCH} if dims is None else dims
        self._is_local = is_local
        self._skew = 1.0
        self._values: dict[sympy.Basic, int] = {}
        self._routed: set[sympy.Basic] = set()
        self._cache: dict[sympy.Expr, int] = {}

    def skewed(self, skew: float) -> Sizes:
        """These sizes on a rank that receives `skew` times as many routed rows."""
        other = copy.copy(self)
        other._skew, other._cache = self._skew * skew, {}
        return other

    def size(self, size: int | torch.SymInt) -> int:
        """The nominal value of a size; a symbol that nobody bound gets the nominal size."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        if expr not in self._cache:
            self._cache[expr] = self._evaluate(expr, size)
        return self._cache[expr]

    def is_known(self, size: int | torch.SymInt) -> bool:
        return isinstance(size, int) or not self._unbound(size)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.size(size) for size in tensor.shape)

    def num_bytes(self, tensor: torch.Tensor) -> int:
        count = tensor.element_size()
        for size in tensor.shape:
            count *= self.size(size)
        return count

    def is_routed(self, size: int | torch.SymInt) -> bool:
        """Whether the size counts rows that a rank receives, so that skew changes it."""
        return not isinstance(size, int) and not self._routed.isdisjoint(
            size.node.expr.free_symbols
        )

    def bind(self, size: int | torch.SymInt, value: int, is_routed: bool = False) -> None:
        """Choose the data-dependent symbols of `size`, a sum of them, so that it is `value`."""
        if isinstance(size, int):
            return
        expr, unbound = size.node.expr, self._unbound(size)
        share = sum(expr.coeff(symbol) for symbol in unbound)
        if not unbound or share == 0:
            return
        known = expr.xreplace({symbol: sympy.Integer(0) for symbol in unbound})
        rest = value - self._evaluate(known, size)
        for symbol in unbound:
            self._values[symbol] = max(0, int(rest // share))
        self._routed.update(unbound if is_routed else ())

    def _unbound(self, size: torch.SymInt) -> list[sympy.Symbol]:
        symbols = free_unbacked_symbols(size)
        return sorted((s for s in symbols if s not in self._values), key=str)

    def _evaluate(self, expr: sympy.Expr, size: torch.SymInt) -> int:
        values = {symbol: sympy.Integer(self._value(symbol, size)) for symbol in expr.free_symbols}
        return int(cast(sympy.Integer, expr.xreplace(values)))

    def _value(self, symbol: sympy.Basic, size: torch.SymInt) -> int:
        if symbol in self._routed:
            return round(self._values[symbol] * self._skew)
        if symbol in self._values:
            return self._values[symbol]
        if self._is_local and (hint := hint_of(symbol, size)) is not None:
            return hint
        dim = input_dim_of(symbol, size)
        return self._nominal_size if dim is None else self._dims.get(dim, self._nominal_size)


def input_dim_of(symbol: sympy.Basic, size: torch.SymInt) -> int | None:
    """Which dimension of graph inputs a symbol of `size` is, the last one if it is several; None if
    it is another kind of input, or what the data decides."""
    sources = size.node.shape_env.var_to_sources.get(symbol, [])
    dims = [getattr(source, "idx", -1) for source in sources]
    return None if not dims or -1 in dims else max(dims)


def hint_of(symbol: sympy.Basic, size: torch.SymInt) -> int | None:
    """What a symbol of `size` was in the batch that was compiled with; None if only data says."""
    hint = size.node.shape_env.backed_var_to_val.get(symbol)
    return None if hint is None else int(hint)


def nominal_sizes(
    gm: fx.GraphModule,
    nominal_size: int = NOMINAL_SIZE,
    dims: Mapping[int, int] | None = None,
) -> Sizes:
    """Nominal sizes for `gm`, its data-dependent symbols bound under balanced routing."""
    return _with_rows(gm, Sizes(nominal_size, dims))


def local_sizes(gm: fx.GraphModule, nominal_size: int = NOMINAL_SIZE) -> Sizes:
    """The sizes of the batch that `gm` was compiled with, on this rank; routing is balanced."""
    return _with_rows(gm, Sizes(nominal_size, is_local=True))


def _with_rows(gm: fx.GraphModule, sizes: Sizes) -> Sizes:
    """Bind the data-dependent symbols.

    What an exchange says may bind the rows of an earlier one, as in a backward graph: the graph is
    read until nothing new is learnt, three times at most.
    """
    sharers = [node for node in gm.graph.nodes if _shares_rows(node)]
    for _ in range(3):
        for node in sharers:
            _bind_shares(node, sizes)
    return sizes


def _shares_rows(node: fx.Node) -> bool:
    if collectives.is_start(node):
        return collectives.kind_of(node) is Kind.ALL_TO_ALL
    return graph.is_call(node, _aten.split_with_sizes)


def _bind_shares(node: fx.Node, sizes: Sizes) -> None:
    if graph.is_call(node, _aten.split_with_sizes):
        args: Any = fake_arguments(node)[0]
        dim = args[2] if len(args) > 2 else node.kwargs.get("dim", 0)
        sides = [(args[0].shape[dim], args[1])]
    else:
        fakes = cast(Any, fx.map_arg(collectives.splits_of(node), graph.fake_value))
        rows = [graph.fake_value(collectives.rows_of(node)), graph.fake_value(node)]
        num_sent, num_received = (next(graph.tensors_of(value)).shape[0] for value in rows)
        sides = [(num_sent, fakes[1]), (num_received, fakes[0])]
    known = next((total for total, _ in sides if sizes.is_known(total)), None)
    if known is None:
        return
    # Balanced routing: a rank receives as many rows as it sends, and skew makes it other than that.
    num_rows, is_routed = sizes.size(known), sizes.is_routed(known)
    for total, parts in sides:
        is_side_routed = sizes.is_routed(total) if sizes.is_known(total) else not is_routed
        for size in parts:
            sizes.bind(size, num_rows // len(parts), is_side_routed)
        sizes.bind(total, num_rows, is_side_routed)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call as a cost function sees it: fake arguments, and their nominal shapes.

    args, kwargs: the node's arguments, nodes replaced by their fake values.
    result: the node's fake value.
    sizes: nominal sizes; `shape` and `moved_bytes` use them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    sizes: Sizes

    def shape(self, index: int) -> tuple[int, ...]:
        """Nominal shape of the tensor argument at `index`."""
        return self.sizes.shape(self.args[index])

    def moved_bytes(self) -> int:
        """Bytes of every tensor argument and of every tensor of the result, each once."""
        tensors = {id(t): t for t in _tensors((self.args, dict(self.kwargs), self.result))}
        return sum(self.sizes.num_bytes(tensor) for tensor in tensors.values())

    def result_bytes(self) -> int:
        return sum(self.sizes.num_bytes(tensor) for tensor in _tensors(self.result))

    def dtype(self) -> torch.dtype:
        """The dtype computed in: that of the first tensor argument."""
        return next((tensor.dtype for tensor in _tensors(self.args)), torch.float32)


CostFunction = Callable[[Call], Work]
_COSTS: dict[Any, CostFunction] = {}


def register_cost(op: Any, cost: CostFunction) -> None:
    """Let `cost` say what a call of `op` (an operator, an overload of one, or a function) does.

    Raises ConfigError if the operator has a cost function already.
    """
    if graph.operator(op) in _COSTS:
        raise ConfigError(f"operator {op} has a cost function already")
    _COSTS[op] = cost


def estimate(
    gm: fx.GraphModule,
    profile: Profile,
    group_size: Callable[[str], int],
    sizes: Sizes | None = None,
) -> Costs:
    """Costs of every node of `gm` on `profile`; `group_size` gives a group's ranks by its name.

    `sizes` are those of the joint graph that `gm` is a part of: a part alone may not show what
    binds its data-dependent symbols. Equal for ranks whose graphs differ only in symbol hints.
    Nodes need fake values.
    """
    sizes = sizes or nominal_sizes(gm, profile.nominal_size)
    on_device = any(_is_on_device(node) for node in gm.graph.nodes)

    def cost(node: fx.Node) -> NodeCost:
        result_bytes = _result_bytes(node, sizes)
        if collectives.is_start(node):
            num_ranks = group_size(collectives.group_of(node))
            return NodeCost(
                collective_us=_collective_us(node, profile, num_ranks, sizes),
                link=profile.link_of(num_ranks),
                result_bytes=result_bytes,
            )
        if _is_host_read(node, on_device):
            return NodeCost(profile.host_read_us, is_host_read=True, result_bytes=result_bytes)
        return NodeCost(work_of(node, sizes).us(profile), result_bytes=result_bytes)

    return Costs({node.name: cost(node) for node in gm.graph.nodes}, profile.launch_us)


def from_function(
    gm: fx.GraphModule, us: Callable[[fx.Node], float], launch_us: float = 0.0
) -> Costs:
    """Costs that a plain function gives, in microseconds: of the collective for a start, of the
    compute for everything else. All groups share one link."""
    sizes = nominal_sizes(gm)

    def cost(node: fx.Node) -> NodeCost:
        result_bytes = _result_bytes(node, sizes)
        if collectives.is_start(node):
            return NodeCost(collective_us=us(node), link="link", result_bytes=result_bytes)
        is_read = collectives.is_host_read(node)
        return NodeCost(us(node), is_host_read=is_read, result_bytes=result_bytes)

    return Costs({node.name: cost(node) for node in gm.graph.nodes}, launch_us)


def is_matmul(node: fx.Node) -> bool:
    """Whether the node is a matrix product, attention or a convolution."""
    return _packet(node) in flop_registry or _packet(node) in _EXTRA_FLOPS


def unit_us(node: fx.Node) -> float:
    """The unit cost model: 1 for every collective and every matrix product, 0 for the rest."""
    return float(collectives.is_start(node) or is_matmul(node))


def _collective_us(node: fx.Node, profile: Profile, num_ranks: int, sizes: Sizes) -> float:
    volume = volume_of(node, num_ranks, sizes)
    return profile.collective_us(collectives.kind_of(node).value, num_ranks, volume)


def volume_of(start: fx.Node, num_ranks: int, sizes: Sizes) -> float:
    """Bytes that one rank of `num_ranks` sends, or receives, where a router sends it more."""
    kind, num_bytes = collectives.kind_of(start), sizes.num_bytes(collectives.operand_of(start))
    if kind is Kind.ALL_TO_ALL:
        num_bytes = max([num_bytes, *_result_bytes(start, sizes)])
    return collectives.volume_of(start, num_bytes, num_ranks)


def work_of(node: fx.Node, sizes: Sizes) -> Work:
    """What a node does; nothing for one that only names memory, and for communication."""
    if node.op != "call_function" or collectives.is_wait(node) or collectives.is_start(node):
        return Work()
    args, kwargs = fake_arguments(node)
    call = Call(args, kwargs, graph.fake_value(node), sizes)
    for op in (node.target, _packet(node)):
        if op in _COSTS:
            return _COSTS[op](call)
    if _packet(node) in _ALLOCATIONS or is_view(node):
        return Work()
    if not _tensors(call.result):
        return Work()
    return Work(_flops(node, call), call.moved_bytes(), call.dtype())


def is_view(node: fx.Node) -> bool:
    """Whether the result only names memory that an argument owns, and nothing is written."""
    results = _tensors(graph.fake_value(node))
    if not results or not isinstance(node.target, torch._ops.OpOverload):
        return bool(results) and node.op == "call_function" and _is_plain_function(node.target)
    if node.target._schema.is_mutable:
        return False
    owned = {graph.storage_of(t) for t in _tensors(fake_arguments(node))}
    return all(graph.storage_of(result) in owned for result in results)


def _is_plain_function(target: Any) -> bool:
    """Whether `target` is a Python function on values, such as operator.getitem."""
    return callable(target) and not isinstance(target, torch._ops.OperatorBase)


def _flops(node: fx.Node, call: Call) -> float:
    packet = _packet(node)
    if packet in _EXTRA_FLOPS:
        return _EXTRA_FLOPS[packet](call)
    if packet not in flop_registry:
        return 0.0

    def nominal(value: Any) -> Any:
        return torch.Size(call.sizes.shape(value)) if isinstance(value, torch.Tensor) else value

    args, kwargs, result = pytree.tree_map(nominal, (call.args, dict(call.kwargs), call.result))
    return float(flop_registry[packet](*args, **kwargs, out_val=result))


def _grouped_mm_flops(call: Call) -> float:
    """A ragged dimension counts whole: its groups together make one product's worth."""
    a, b = call.shape(0), call.shape(1)
    batch = a[0] if len(a) == len(b) == 3 else 1
    return 2.0 * batch * a[-2] * a[-1] * b[-1]


def _product_flops(call: Call, left: int = 0) -> float:
    """By result and left factor alone: nominal sizes of both factors need not fit, where a program
    holds for one size only."""
    return 2.0 * torch.Size(call.sizes.shape(call.result)).numel() * call.shape(left)[-1]


def _added_product_flops(call: Call) -> float:
    return _product_flops(call, left=1)


def _attention_flops(call: Call) -> float:
    (*batch, query, depth), key = call.shape(0), call.shape(1)[-2]
    return 4.0 * torch.Size(batch).numel() * query * key * depth


def _attention_backward_flops(call: Call) -> float:
    (*batch, query, depth), key = call.shape(1), call.shape(2)[-2]
    return 10.0 * torch.Size(batch).numel() * query * key * depth


_EXTRA_FLOPS: dict[Any, Callable[[Call], float]] = {
    _aten.mm: _product_flops,
    _aten.bmm: _product_flops,
    _aten.linear: _product_flops,
    _aten.matmul: _product_flops,
    _aten.addmm: _added_product_flops,
    _aten.baddbmm: _added_product_flops,
    _aten._grouped_mm: _grouped_mm_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    _aten.scaled_dot_product_attention: _attention_flops,
}
_ALLOCATIONS = (_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided)


def _lookup_work(call: Call) -> Work:
    """A lookup reads the rows that it returns, not the whole table."""
    return Work(num_bytes=2.0 * call.result_bytes())


for _op in (
    _aten.embedding,
    _aten.gather,
    _aten.index,
    _aten.index_select,
    _aten.slice_scatter,
    _aten.select_scatter,
    _aten.slice_backward,
    _aten.select_backward,
):
    register_cost(_op, _lookup_work)


def _is_host_read(node: fx.Node, on_device: bool) -> bool:
    if graph.is_call(node, _aten._to_copy):
        source, result = fake_arguments(node)[0][0], graph.fake_value(node)
        is_copy_back = source.device.type != "cpu" and result.device.type == "cpu"
        return is_copy_back and not node.kwargs.get("non_blocking", False)
    if not collectives.is_host_read(node):
        return False
    # Where the program runs on a device, an item of a host tensor is there already.
    return not on_device or fake_arguments(node)[0][0].device.type != "cpu"


def _is_on_device(node: fx.Node) -> bool:
    return any(t.device.type not in ("cpu", "meta") for t in _tensors(graph.fake_value(node)))


def _result_bytes(node: fx.Node, sizes: Sizes) -> tuple[int, ...]:
    if node.op == "output":
        return ()
    return tuple(sizes.num_bytes(t) for t in graph.tensors_of(graph.fake_value(node)))


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node, nodes replaced by their fake values."""
    return cast(Any, fx.map_arg((node.args, node.kwargs), graph.fake_value))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
