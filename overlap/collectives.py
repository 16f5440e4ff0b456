"""Recognise communication in an FX graph: what starts it, what waits for it, its kind, group and
volume. Other transports are recognised once registered (`register_transport`): every other module
asks here, none knows an operator.

A collective is two nodes: a *start*, whose result is in flight, and a *wait*, whose result may be
read. Volumes are what one rank sends over its link, S being the bytes of the whole operand and n
the group's size:

    all-gather, reduce-scatter, all-to-all   S (n - 1) / n
    all-reduce                               2 S (n - 1) / n
    broadcast, point-to-point                S

Source: the bandwidth-optimal bounds that NCCL's bus-bandwidth definition uses (nccl-tests,
PERFORMANCE.md).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from overlap import graph
from overlap.errors import ConfigError, unknown_name


class Kind(enum.Enum):
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    P2P = "p2p"

    def volume(self, operand_bytes: Any, group_size: int) -> Any:
        """Bytes that one rank sends; see the module's table. `operand_bytes` may be symbolic."""
        match self:
            case Kind.ALL_REDUCE:
                return 2 * operand_bytes * (group_size - 1) / group_size
            case Kind.BROADCAST | Kind.P2P:
                return operand_bytes
            case _:
                return operand_bytes * (group_size - 1) / group_size


_c10d = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class Transport:
    """How to read the calls of one operator that starts communication; the fields that are text
    name arguments of its schema.

    start: the operator (an OpOverloadPacket), whose result, a tensor, is in flight.
    kind: what it does.
    wait: the operator that takes that result alone and returns what has arrived.
    rows: what is sent, along dim 0.
    group: the name of the process group.
    output_splits, input_splits: of an all-to-all, how many rows come from and go to each rank, read
        by the host; "" for a transport that always sends equal parts.
    sent_bytes: bytes that one rank sends, given those of the whole operand and the group's size; by
        default what the kind needs.
    """

    start: Any
    kind: Kind = Kind.ALL_TO_ALL
    wait: Any = _c10d.wait_tensor
    rows: str = "input"
    group: str = "group_name"
    output_splits: str = ""
    input_splits: str = ""
    sent_bytes: Callable[[Any, int], Any] | None = None


_TRANSPORTS: dict[Any, Transport] = {}
_WAITS: dict[Any, None] = {}


def register_transport(transport: Transport) -> None:
    """Let an operator be recognised as communication: costed, scheduled, verified, and where it is
    an all-to-all whose splits are known, sliced like the functional one.

    Raises ConfigError if it is registered already, or an operator has no such arguments.
    """
    start, wait = graph.operator(transport.start), graph.operator(transport.wait)
    if start in _TRANSPORTS:
        raise ConfigError(f"transport {start} is registered already")
    named = (transport.rows, transport.group, transport.output_splits, transport.input_splits)
    for schema in graph.schemas(start):
        valid = [argument.name for argument in schema.arguments]
        for name in filter(None, named):
            if name not in valid:
                raise unknown_name("argument", name, valid, place=f"of {start}")
    for schema in graph.schemas(wait):
        if len([a for a in schema.arguments if not a.has_default_value()]) != 1:
            raise ConfigError(
                f"{wait} cannot wait for {start}: it takes {len(schema.arguments)} arguments, "
                "expected what is in flight alone"
            )
    _TRANSPORTS[start] = transport
    _WAITS[wait] = None


_FUNCTIONAL: dict[Kind, Any] = {
    Kind.ALL_TO_ALL: _c10d.all_to_all_single,
    Kind.ALL_GATHER: _c10d.all_gather_into_tensor,
    Kind.REDUCE_SCATTER: _c10d.reduce_scatter_tensor,
    Kind.ALL_REDUCE: _c10d.all_reduce,
    Kind.BROADCAST: _c10d.broadcast,
}

for _kind, _packet in _FUNCTIONAL.items():
    _splits = ("output_split_sizes", "input_split_sizes") if _kind is Kind.ALL_TO_ALL else ("", "")
    register_transport(Transport(_packet, _kind, output_splits=_splits[0], input_splits=_splits[1]))
register_transport(Transport(_c10d.all_reduce_, Kind.ALL_REDUCE))


def _transport(node: fx.Node) -> Transport | None:
    if node.op != "call_function":
        return None
    return _TRANSPORTS.get(getattr(node.target, "overloadpacket", None))


def is_start(node: fx.Node) -> bool:
    return _transport(node) is not None


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _WAITS


def kind_of(start: fx.Node) -> Kind:
    return _known(start).kind


def group_of(start: fx.Node) -> str:
    """A group is a name in the graph; a process-group object is shown by its name."""
    raw = graph.schema_arguments(start)[_known(start).group]
    if isinstance(raw, fx.Node):
        return raw.name
    return raw if isinstance(raw, str) else getattr(raw, "group_name", str(raw))


def rows_of(start: fx.Node) -> fx.Node:
    """What a start sends."""
    rows = graph.schema_arguments(start)[_known(start).rows]
    assert isinstance(rows, fx.Node), f"{start} sends {rows}"
    return rows


def splits_of(start: fx.Node) -> tuple[Sequence[Any], Sequence[Any]]:
    """How many rows come from and go to each rank; empty where the call does not say."""
    transport, arguments = _known(start), graph.schema_arguments(start)
    outs, ins = (arguments.get(n) for n in (transport.output_splits, transport.input_splits))
    return outs or (), ins or ()


def with_parts(
    start: fx.Node, rows: fx.Node, output_splits: Sequence[Any], input_splits: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a start that sends something else."""
    transport = _known(start)
    names = (transport.rows, transport.output_splits, transport.input_splits)
    new = dict(zip(names, (rows, list(output_splits), list(input_splits)), strict=True))
    return graph.arguments_with(start, new)


def operand_of(start: fx.Node) -> torch.Tensor:
    """The fake tensor whose bytes are S: the gathered output of an all-gather, the input of
    everything else."""
    source = start if kind_of(start) is Kind.ALL_GATHER else rows_of(start)
    return next(graph.tensors_of(graph.fake_value(source)))


def volume_of(start: fx.Node, operand_bytes: Any, group_size: int) -> Any:
    """Bytes that one rank sends, by the transport's own formula or its kind's."""
    transport = _known(start)
    return (transport.sent_bytes or transport.kind.volume)(operand_bytes, group_size)


def functional_like(node: fx.Node) -> Any:
    """The functional collective that does what a start or wait of any transport does; None for
    other nodes, and where there is none."""
    if is_wait(node):
        return _c10d.wait_tensor
    transport = _transport(node)
    return _FUNCTIONAL.get(transport.kind) if transport else None


def awaited(wait: fx.Node) -> fx.Node:
    """What a wait waits for."""
    return wait.all_input_nodes[0]


def start_of(wait: fx.Node) -> fx.Node | None:
    """The start that a wait is for, through the item of a tuple; None where the wait is on a graph
    input."""
    source: Any = awaited(wait)
    while isinstance(source, fx.Node) and not is_start(source):
        if source.op != "call_function" or isinstance(source.target, torch._ops.OperatorBase):
            return None
        source = source.args[0]
    return source if isinstance(source, fx.Node) else None


def waits_of(start: fx.Node) -> list[fx.Node]:
    return [user for user in start.users if is_wait(user)]


def has_collective(gm: fx.GraphModule) -> bool:
    return any(is_start(node) for node in gm.graph.nodes)


def is_host_read(node: fx.Node) -> bool:
    """Whether the host blocks on a device value here: an item or an equivalent."""
    return graph.is_call(node, torch.ops.aten._local_scalar_dense, torch.ops.aten.item)


def _known(start: fx.Node) -> Transport:
    transport = _transport(start)
    assert transport is not None, f"{start} starts no collective"
    return transport
