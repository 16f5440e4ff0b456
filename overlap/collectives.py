"""Recognise communication in an FX graph: what starts it, what waits for it, its kind, group and
volume. Other transports are recognised once registered.

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
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from overlap import graph
from overlap.errors import ConfigError

_c10d = torch.ops._c10d_functional


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


@dataclasses.dataclass(frozen=True)
class Transport:
    """How to recognise one operator that starts communication.

    packet: the operator (an OpOverloadPacket).
    kind: what it does.
    group: the node's group name.
    operand: the node's fake tensor whose bytes are S: the gathered output of an all-gather, the
        input of everything else.
    """

    packet: Any
    kind: Kind
    group: Callable[[fx.Node], str]
    operand: Callable[[fx.Node], torch.Tensor]


def _input(node: fx.Node) -> torch.Tensor:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return graph.fake_value(source)


def _last_argument(node: fx.Node) -> str:
    return _group_name(node.kwargs.get("group_name", node.args[-1] if node.args else ""))


def _group_name(raw: Any) -> str:
    """A group is a name in the graph; a process-group object is shown by its name."""
    if isinstance(raw, fx.Node):
        return raw.name
    return raw if isinstance(raw, str) else getattr(raw, "group_name", str(raw))


_TRANSPORTS: dict[Any, Transport] = {}
_WAITS: dict[Any, None] = {_c10d.wait_tensor: None}


def register_transport(transport: Transport, wait: Any = None) -> None:
    """Let an operator be recognised as communication; `wait` is the operator that waits for it,
    None for the functional collectives' own. Raises ConfigError if it is registered already."""
    if transport.packet in _TRANSPORTS:
        raise ConfigError(f"transport {transport.packet} is registered already")
    _TRANSPORTS[transport.packet] = transport
    if wait is not None:
        _WAITS[wait] = None


for _packet, _kind, _operand in (
    (_c10d.all_to_all_single, Kind.ALL_TO_ALL, _input),
    (_c10d.all_gather_into_tensor, Kind.ALL_GATHER, graph.fake_value),
    (_c10d.reduce_scatter_tensor, Kind.REDUCE_SCATTER, _input),
    (_c10d.all_reduce, Kind.ALL_REDUCE, _input),
    (_c10d.all_reduce_, Kind.ALL_REDUCE, _input),
    (_c10d.broadcast, Kind.BROADCAST, _input),
):
    register_transport(Transport(_packet, _kind, _last_argument, _operand))


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
    return _known(start).group(start)


def operand_of(start: fx.Node) -> torch.Tensor:
    return _known(start).operand(start)


def start_of(wait: fx.Node) -> fx.Node | None:
    """The start that a wait is for, through the item of a tuple; None where the wait is on a graph
    input."""
    source = wait.args[0]
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
