"""Cut a scheduled graph into runs of compute that may become one kernel call each.

    all_to_all      fixed: stays where the schedule put it
    mul, mm, relu   run 0
    wait            fixed
    add, mean       run 1
    addmm_          eager: writes in place

Three kinds of nodes:

    FIXED   what must keep its place: starts, waits, host reads, random numbers, writes that others
            see, every operator that is not of ATen. No other node crosses one.
    EAGER   pure, called one by one: numbers on the host, writes into a value that nobody else reads
            and that value, sizes that depend on data, complex numbers.
    FUSED   everything else.

Between two fixed nodes, nodes that depend on no eager node come first, as one run; then the eager
nodes that are ready; then the next run. So a run is as long as the data flow lets it be, and the
order of the fixed nodes, which is the schedule, is kept.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from overlap import collectives, graph, verify

MIN_KERNELS = 2
"""A run of fewer operators that compute has nothing to fuse: it stays eager."""


_OF_THE_HOST = (torch.ops.aten._assert_scalar, torch.ops.aten.sym_size, torch.ops.aten.sym_stride)
_Roots = Mapping[fx.Node, frozenset[fx.Node]]


class Kind(enum.Enum):
    FIXED = "fixed"
    EAGER = "eager"
    FUSED = "fused"


@dataclasses.dataclass(frozen=True)
class Run:
    """Compute that may become one call: its nodes in order, what it reads, what others read of it.

    inputs: nodes outside the run, tensors and sizes, in the order of first use.
    outputs: nodes of the run, in order; each is one tensor.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node]) -> Run:
        own = dict.fromkeys(nodes)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
        return cls(
            tuple(nodes),
            tuple(node for node in read if node not in own),
            tuple(node for node in nodes if any(user not in own for user in node.users)),
        )


@dataclasses.dataclass(frozen=True)
class Cut:
    """The nodes of a graph in an order in which the nodes of each run are neighbours."""

    order: tuple[fx.Node, ...]
    runs: tuple[Run, ...]


def cut(gm: fx.GraphModule) -> Cut:
    """Plan the runs of a graph; leaves it as it is."""
    roots = verify.storage_roots(gm.graph.nodes)
    kinds = kinds_of(gm, roots)
    segments = [_Segment()]
    where: dict[fx.Node, _Segment] = {}
    for node in gm.graph.nodes:
        # A part goes with its tuple, so that no run hands out a tuple.
        is_inside = _is_part(node) and kinds[_tuple_of(node)] is not Kind.FIXED
        segment = where[_tuple_of(node)] if is_inside else segments[-1]
        where[node] = segment
        segment.add(node, kinds[node])
        if kinds[node] is Kind.FIXED:
            segments.append(_Segment())
    groups = [group for segment in segments for group in segment.groups()]
    runs = [
        Run.of(nodes)
        for kind, nodes in groups
        if kind is Kind.FUSED and _num_kernels(nodes, roots) >= MIN_KERNELS
    ]
    return Cut(tuple(node for _, nodes in groups for node in nodes), tuple(runs))


@dataclasses.dataclass
class _Segment:
    """What lies between two fixed nodes, and the fixed node that ends it.

    A level is a run and the eager nodes after it; level -1 is what needs no run.
    """

    levels: dict[fx.Node, int] = dataclasses.field(default_factory=dict[fx.Node, int])
    kinds: dict[fx.Node, Kind] = dataclasses.field(default_factory=dict[fx.Node, Kind])

    def add(self, node: fx.Node, kind: Kind) -> None:
        own = [source for source in node.all_input_nodes if source in self.levels]
        level = max((self.levels[source] for source in own), default=-1)
        is_after_eager = any(
            self.levels[source] == level and self.kinds[source] is not Kind.FUSED for source in own
        )
        if kind is Kind.FUSED and (level == -1 or is_after_eager):
            level += 1
        self.levels[node], self.kinds[node] = level, kind

    def groups(self) -> Iterator[tuple[Kind, list[fx.Node]]]:
        last = max(self.levels.values(), default=-1)
        for level in range(-1, last + 1):
            for kind in (Kind.FUSED, Kind.EAGER):
                nodes = [
                    n for n, at in self.levels.items() if at == level and self.kinds[n] is kind
                ]
                if nodes:
                    yield kind, nodes
        fixed = [node for node, kind in self.kinds.items() if kind is Kind.FIXED]
        if fixed:
            yield Kind.FIXED, fixed


def _num_kernels(nodes: Sequence[fx.Node], roots: _Roots) -> int:
    """How many of the nodes compute, rather than name memory that there is."""
    return sum(not _is_part(node) and roots[node] == {node} for node in nodes)


def kinds_of(gm: fx.GraphModule, roots: _Roots | None = None) -> dict[fx.Node, Kind]:
    """The kind of every node, in order. `roots`: of `verify.storage_roots`, if they are at hand."""
    roots = verify.storage_roots(gm.graph.nodes) if roots is None else roots
    # Inductor may return one value for two that are equal, or a value for its copy, and whoever
    # writes into one would write into the other.
    written = {
        root for node in gm.graph.nodes for made in verify.written_by(node) for root in roots[made]
    }
    kinds: dict[fx.Node, Kind] = {}
    for node in gm.graph.nodes:
        if _is_part(node):
            is_fused = kinds[_tuple_of(node)] is Kind.FUSED
            kinds[node] = Kind.FUSED if is_fused else Kind.EAGER
        elif _is_fixed(node):
            kinds[node] = Kind.FIXED
        elif roots[node] & written or not _is_fusible(node):
            kinds[node] = Kind.EAGER
        else:
            kinds[node] = Kind.FUSED
    return kinds


def _is_part(node: fx.Node) -> bool:
    """Whether a node only picks a value out of a tuple."""
    return graph.is_call(node, operator.getitem)


def _tuple_of(part: fx.Node) -> fx.Node:
    return part.all_input_nodes[0]


def _is_fixed(node: fx.Node) -> bool:
    if node.op == "get_attr":
        return False
    if node.op != "call_function":
        return True
    if collectives.is_start(node) or collectives.is_wait(node) or collectives.is_host_read(node):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return not _is_host_arithmetic(node)
    if node.target.namespace not in ("aten", "prims") or graph.draws_random_numbers(node):
        return True
    if graph.is_call(node, *_OF_THE_HOST):
        return False
    if not list(graph.tensors_of(graph.fake_value(node))):
        return True
    return not all(_is_private(operand) for operand in verify.written_by(node))


def _is_private(operand: fx.Node) -> bool:
    """Whether a value that is written is a new one, read by nobody but who writes it."""
    is_call = operand.op == "call_function" and not verify.written_by(operand)
    is_sum = bool(verify.written_by(operand)) and all(map(_is_private, verify.written_by(operand)))
    return (is_call or is_sum) and not _is_part(operand) and len(operand.users) == 1


def _is_host_arithmetic(node: fx.Node) -> bool:
    """Whether a call computes a number from numbers on the host."""
    value = graph.fake_value(node)
    is_pure = getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
    return is_pure and isinstance(value, int | float | bool | torch.SymInt | torch.SymBool)


def _is_fusible(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if graph.binds_sizes(node) or graph.is_call(node, torch.ops.aten.as_strided):
        return False
    if graph.is_call(node, torch.ops.aten.slice) and _depends_on_data(node):
        return False
    results = list(graph.tensors_of(graph.fake_value(node)))
    sources = [graph.fake_value(source) for source in node.all_input_nodes]
    is_known = all(isinstance(s, torch.Tensor | int | list | tuple) or _is_size(s) for s in sources)
    tensors = results + list(graph.tensors_of(sources))
    is_one_device = len({tensor.device for tensor in tensors}) == 1
    return bool(results) and is_known and is_one_device and all(map(_is_plain, tensors))


def _is_size(value: Any) -> bool:
    """Whether a number can only be what a run takes its numbers for: 0 or more."""
    if not isinstance(value, torch.SymInt):
        return False
    return bool(value.node.shape_env.bound_sympy(value.node.expr).lower >= 0)


def _depends_on_data(node: fx.Node) -> bool:
    """Whether a number that a call is given depends on data. A run of its own does not know how
    such numbers compare, and so not how many rows lie between two of them."""
    numbers = [graph.fake_value(source) for source in node.all_input_nodes]
    return any(isinstance(n, torch.SymInt) and free_unbacked_symbols(n) for n in numbers)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and not tensor.is_complex() and not tensor.is_neg()
