"""Prices of a graph's nodes: from a cost table where there is one, else from formulas.

    the table has the call                   its measured time
    it has the operator in other sizes       the nearest of them, scaled by the formulas
    it does not have the operator            the formula

Calls are compared at nominal sizes: two are one call where operator, dtypes, shapes, strides and
constants are. All of it follows from graph, profile and table, so all ranks price alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from overlap import collectives, cost, graph, printing
from overlap.cost import Costs, NodeCost, Sizes, Sources, Work
from overlap.cost_table import Call, CostTable
from overlap.hardware import Profile

WAIT = "wait()"
_IN_PLACE = re.compile(r"(?<=[a-z0-9])_(?=\.|$)")
_DTYPE = re.compile(r"\b([a-z]+[0-9][a-z0-9]*)\[")


def estimate(
    gm: fx.GraphModule,
    profile: Profile,
    group_size: Callable[[str], int],
    sizes: Sizes | None = None,
    table: CostTable | None = None,
) -> Costs:
    """Costs of every node of `gm`, as `cost.estimate` gives them, from `table` if there is one."""
    sizes = sizes or sizes_of(gm, profile, table)
    by_formula = cost.estimate(gm, profile, group_size, sizes)
    if table is None:
        return by_formula
    prices = _Prices(table, profile, group_size, sizes)
    nodes = {node.name: prices.of(node, by_formula.of(node)) for node in gm.graph.nodes}
    return Costs(nodes, sources=prices.sources())


def sizes_of(
    gm: fx.GraphModule, profile: Profile, table: CostTable | None, skew: float = 1.0
) -> Sizes:
    """The nominal sizes of `gm`: those that the table was measured at, if there is one; of a rank
    that receives `skew` times as many routed rows."""
    sizes = cost.nominal_sizes(gm, profile.nominal_size, table.dims if table else None)
    return sizes.skewed(skew)


def call_of(node: fx.Node, group_size: Callable[[str], int], sizes: Sizes) -> str:
    """A node as the table knows it: `aten.mm(f32[8,4], f32[4,4])`, `all_to_all/2(f32[8,4])` for a
    collective of two ranks, WAIT for any wait; "" for what is no call.

    Adding in place is the same call as adding: the last pass chooses between them.
    """
    if node.op != "call_function":
        return ""
    if collectives.is_wait(node):
        return WAIT
    symbols = _Nominal(sizes)
    if collectives.is_start(node):
        num_ranks = group_size(collectives.group_of(node))
        operand = _format(collectives.operand_of(node), symbols)
        return f"{collectives.kind_of(node).value}/{num_ranks}({operand})"
    args, kwargs = cost.fake_arguments(node)
    shown = [_format(arg, symbols) for arg in args]
    shown += [f"{key}={_format(arg, symbols)}" for key, arg in kwargs.items()]
    name = printing.function_name(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        name = _IN_PLACE.sub("", name)
    return f"{name}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True)
class _Nominal:
    """Symbolic numbers print as their nominal values."""

    sizes: Sizes

    def show(self, value: Any) -> str:
        return str(self.sizes.size(value)) if isinstance(value, torch.SymInt) else "symbol"


def _format(value: Any, symbols: _Nominal) -> str:
    match value:
        case torch.Tensor():
            return printing.format_type(value, symbols) + _strides(value, symbols.sizes)
        case list() | tuple():
            return f"[{', '.join(_format(item, symbols) for item in value)}]"
        case _:
            return printing.format_argument(value, symbols)


def _strides(tensor: torch.Tensor, sizes: Sizes) -> str:
    """The strides where they are not those of a contiguous tensor, else ""."""
    shape, strides = sizes.shape(tensor), [sizes.size(stride) for stride in tensor.stride()]
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return f"@{','.join(map(str, strides))}"
        expected *= size
    return ""


@dataclasses.dataclass(frozen=True)
class _Known:
    """A measured call, and what the formula says of its work."""

    name: str
    call: Call
    formula_us: float


class _Prices:
    """Looks nodes up, and counts where their costs came from."""

    def __init__(
        self,
        table: CostTable,
        profile: Profile,
        group_size: Callable[[str], int],
        sizes: Sizes,
    ) -> None:
        self._table = table
        self._profile = profile
        self._group_size = group_size
        self._sizes = sizes
        self._num_measured = self._num_scaled = 0
        self._formulas: Counter[str] = Counter()
        self._families: dict[tuple[str, str], list[str]] = {}
        for name in sorted(table.calls):
            self._families.setdefault(_family(name), []).append(name)

    def sources(self) -> Sources:
        return Sources(self._num_measured, self._num_scaled, dict(sorted(self._formulas.items())))

    def of(self, node: fx.Node, formula: NodeCost) -> NodeCost:
        name = call_of(node, self._group_size, self._sizes)
        if not name:
            return formula
        price = self._price(node, name, formula)
        is_start = collectives.is_start(node)
        is_link = is_start or collectives.is_wait(node)
        return dataclasses.replace(
            formula,
            compute_us=0.0 if is_link else price.us,
            collective_us=price.us if is_start else 0.0,
            issue_us=price.issue_us if is_link else 0.0,
        )

    def _price(self, node: fx.Node, name: str, formula: NodeCost) -> Call:
        if name in self._table.calls:
            self._num_measured += 1
            return self._table.calls[name]
        launch_us = self._profile.launch_us
        own_us = formula.compute_us + formula.collective_us
        nearest = self._nearest(node, name, own_us)
        if nearest is None:
            self._formulas[name.partition("(")[0]] += 1
            if collectives.is_start(node) or collectives.is_wait(node):
                return Call(own_us, own_us, 1, issue_us=launch_us)
            return Call(launch_us + own_us, launch_us + own_us, 1)
        self._num_scaled += 1
        scale = (launch_us + own_us) / (launch_us + nearest.formula_us)
        return dataclasses.replace(nearest.call, us=nearest.call.us * scale)

    def _nearest(self, node: fx.Node, name: str, own_us: float) -> _Known | None:
        """The measured call of the same operator and dtype whose work is most like the node's."""
        launch_us = self._profile.launch_us
        names = self._families.get(_family(name), [])
        known = [
            _Known(name, self._table.calls[name], self._formula_us(node, name)) for name in names
        ]

        def distance(one: _Known) -> float:
            return abs(math.log((launch_us + own_us + 1e-3) / (launch_us + one.formula_us + 1e-3)))

        return min(known, key=lambda one: (distance(one), one.name), default=None)

    def _formula_us(self, node: fx.Node, name: str) -> float:
        """The formula's time for a measured call of the node's operator."""
        call = self._table.calls[name]
        if not collectives.is_start(node):
            tensors = graph.tensors_of(cost.fake_arguments(node)[0])
            dtype = next((tensor.dtype for tensor in tensors), torch.float32)
            return Work(call.flops, call.num_bytes, dtype).us(self._profile)
        kind, num_ranks = collectives.kind_of(node), self._group_size(collectives.group_of(node))
        return self._profile.collective_us(kind.value, num_ranks, call.num_bytes)


@functools.lru_cache(maxsize=65536)
def _family(name: str) -> tuple[str, str]:
    """Calls that scale into each other: the operator, and the dtype of its first tensor."""
    dtype = _DTYPE.search(name)
    return name.partition("(")[0], dtype[1] if dtype else ""
