"""One graph for forward, loss and backward.

    forward   loss, saved = f(x, w)                   step    loss, dw = f'(x, w, tangent=1)
    backward  dw = b(saved, tangent)                  scale   dw = scaled(dw, tangent)

The backward of a scalar loss is linear in its tangent, so gradients for a tangent of 1 times the
real one are the gradients. They take the place of what the forward saved: autograd keeps them until
the backward comes.

AOTAutograd's two graphs are made first and then joined, so that what a checkpoint asks to be
computed again is in the backward's part of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from overlap import collectives, graph, printing, slicing
from overlap.errors import OverlapError
from overlap.runtime import scaling

_aten = torch.ops.aten
_LINEAR_BACKWARDS = ("aten", "prims", "profiler", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators whose backward is torch's own, and so linear."""

Parts = tuple[fx.GraphModule, fx.GraphModule]
"""A forward and a backward graph, as AOTAutograd's partitioner leaves them."""


class Refused(OverlapError):
    """Why forward and backward stay two graphs, and what to change."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


def check_operators(captured: fx.GraphModule) -> None:
    """Raises Refused if a captured forward calls an operator whose backward may not be linear."""
    bodies = [body for body in captured.modules() if isinstance(body, fx.GraphModule)]
    for node in (node for body in bodies for node in body.graph.nodes):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in _LINEAR_BACKWARDS:
            raise Refused(
                f"{printing.function_name(target)} may have a backward that is not linear",
                "leave it out of the compiled function",
            )


def check_parts(parts: Parts, num_outputs: int) -> None:
    """Raises Refused unless the backward is one that can run with the forward and be scaled."""
    forward, backward = parts
    num_saved = len(_results(forward)) - num_outputs
    tangents = graph.placeholders(backward.graph)[num_saved:]
    if not all(node.name.startswith("tangents") for node in tangents):
        raise Refused(
            "the backward has states of random-number generators as inputs",
            "leave random operators out of checkpointed regions",
        )
    if len(tangents) != 1:
        raise Refused(
            f"the program has {len(tangents)} results with a gradient; the loss has to be the only "
            "one",
            "return the loss, and detach whatever else is returned",
        )
    tangent = graph.fake_value(tangents[0])
    if tangent.dim() or not tangent.is_floating_point():
        shown = printing.format_type(tangent)
        raise Refused(
            f"the program returns {shown}, which is no scalar loss",
            "compute the loss inside the compiled function",
        )
    if small := next(filter(_has_less_range, backward.graph.nodes), None):
        raise Refused(
            f"{small} of the backward is {printing.format_type(graph.fake_value(small))}, where a "
            "gradient that is not scaled yet may be lost",
            "train in bfloat16 or float32",
        )
    devices = {str(graph.fake_value(node).device) for node in _gradients(backward)}
    if devices - {str(tangent.device)}:
        raise Refused(
            f"the loss is on {tangent.device}, and a gradient on {', '.join(sorted(devices))}",
            "return the loss where it was computed",
        )


def _has_less_range(node: fx.Node) -> bool:
    """Whether a tensor of the node has fewer exponents than float32."""
    least = torch.finfo(torch.float32).smallest_normal
    dtypes = {tensor.dtype for tensor in graph.tensors_of(graph.fake_value(node))}
    floating = [d for d in dtypes if d.is_floating_point or d.is_complex]
    return any(torch.finfo(dtype).smallest_normal > least for dtype in floating)


def join(parts: Parts, num_outputs: int, group_size: Callable[[str], int]) -> Parts:
    """The step and the scaling, to take the place of the forward and the backward graph.

    The step returns the first `num_outputs` results of the forward and each gradient once.
    """
    forward, backward = parts
    step = _join(forward, backward, num_outputs)
    groups = dict.fromkeys(
        collectives.group_of(node) for node in backward.graph.nodes if collectives.is_start(node)
    )
    mixing = [group for group in groups if group_size(group) > 1]
    return step, _make_scaling(step, backward, num_outputs, mixing, group_size)


def meeting(step: fx.GraphModule) -> fx.Node | None:
    """The node of the forward that every collective of the backward waits for and that itself waits
    for collectives of all slices; None where a slice may begin its backward before others end their
    forward, or where there is one slice."""
    slices: dict[fx.Node, frozenset[int]] = {}
    last: list[fx.Node] = []
    for node in step.graph.nodes:
        slices[node] = frozenset[int]().union(*(slices[n] for n in node.all_input_nodes))
        if collectives.is_start(node) and graph.is_backward(node):
            last.append(node)
        elif collectives.is_start(node) and (index := graph.tag_of(node).slice) is not None:
            slices[node] |= {index}
    all_slices = frozenset[int]().union(*slices.values())
    if len(all_slices) < 2 or not last or any(slices[node] != all_slices for node in last):
        return None
    needed = slicing.ancestors(last)
    return next(n for n in slices if n in needed and slices[n] == all_slices)


def _join(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> fx.GraphModule:
    joined = fx.Graph()
    results: Any = joined.graph_copy(forward.graph, {})
    outputs, saved = list(results[:num_outputs]), list(results[num_outputs:])
    saved.sort(key=lambda node: not graph.is_size(node))  # sizes come first in a backward
    *_, tangent = inputs = graph.placeholders(backward.graph)
    given = dict(zip(inputs, [*saved, _make_one(joined, tangent)], strict=True))
    gradients: Any = joined.graph_copy(backward.graph, given)
    joined.output((*outputs, *_distinct(gradients)))
    return fx.GraphModule(_attributes(forward) | _attributes(backward), joined)


def _make_one(joined: fx.Graph, tangent: fx.Node) -> fx.Node:
    value = graph.fake_value(tangent)
    place = {"dtype": value.dtype, "device": value.device}
    one = joined.call_function(_aten.full.default, ([], 1.0), place)
    graph.copy_facts(tangent, one)
    graph.set_fake_value(one, value)
    return one


def _make_scaling(
    step: fx.GraphModule,
    backward: fx.GraphModule,
    num_outputs: int,
    groups: Sequence[str],
    group_size: Callable[[str], int],
) -> fx.GraphModule:
    made = fx.Graph()
    gradients = _results(step)[num_outputs:]
    inputs = [_placeholder_like(made, node) for node in gradients]
    tangent = _placeholder_like(made, graph.placeholders(backward.graph)[-1])
    gathered: list[fx.Node] = []
    for group in groups:
        flat = graph.call_like(tangent, _aten.view.default, (tangent, [1]))
        start = graph.call_like(
            tangent,
            torch.ops._c10d_functional.all_gather_into_tensor.default,
            (flat, group_size(group), group),
        )
        wait = torch.ops._c10d_functional.wait_tensor.default
        gathered.append(graph.call_like(tangent, wait, (start,)))
    factor = made.call_function(scaling.factor_of, (tangent, gathered, list(groups)))
    graph.set_fake_value(factor, graph.fake_value(tangent))
    shared = _shared_storages(step, num_outputs)
    scaled: dict[str, fx.Node] = {}
    for source, gradient in zip(gradients, inputs, strict=True):
        is_shared = not shared.isdisjoint(graph.storages_of(source))
        function = scaling.copied_if_same if is_shared else scaling.scaled
        node = made.call_function(function, (gradient, factor))
        graph.copy_facts(gradient, node)
        graph.set_fake_value(node, graph.fake_value(gradient))
        scaled[source.name] = node
    names = iter(_distinct(_results(backward)))
    by_result = dict(zip(names, scaled.values(), strict=True))
    made.output(tuple(by_result.get(node) for node in _results(backward)))
    return fx.GraphModule({}, made)


def _placeholder_like(made: fx.Graph, source: fx.Node) -> fx.Node:
    node = made.placeholder(source.name)
    graph.copy_facts(source, node)
    graph.set_fake_value(node, graph.fake_value(source))
    return node


def _shared_storages(step: fx.GraphModule, num_outputs: int) -> set[int]:
    """Storages that others than autograd hold once the step has run."""
    held = [node for node in step.graph.nodes if node.op in ("placeholder", "get_attr")]
    held += [node for node in _results(step)[:num_outputs] if isinstance(node, fx.Node)]
    return {storage for node in held for storage in graph.storages_of(node)}


def _results(gm: fx.GraphModule) -> list[Any]:
    return list(graph.args_of(graph.output_node(gm.graph))[0])


def _gradients(backward: fx.GraphModule) -> list[fx.Node]:
    return _distinct(_results(backward))


def _distinct(results: Iterable[Any]) -> list[fx.Node]:
    return list(dict.fromkeys(node for node in results if isinstance(node, fx.Node)))


def _attributes(gm: fx.GraphModule) -> dict[str, Any]:
    """What the graph's `get_attr` nodes name."""
    names = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    found: dict[str, Any] = {}
    for name in sorted(names):
        value: Any = gm
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value
    return found
