"""Regions that users name in their model: `overlap.annotate`.

    with overlap.annotate("experts", axis="expert"):      @overlap.annotate("head", slice=False)
        y = self.experts(rows)                            def forward(self, x): ...

A mark travels with every node that is made inside, through Dynamo, capture and autograd. What a
region is stays found by structure: a mark gives it a name, leaves it whole, or says along which
axis it is cut. Marks of an inner region override those of an outer one, each by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import fx
from torch.fx import traceback

from overlap import collectives, graph
from overlap.config import AXES
from overlap.errors import ConfigError, unknown_name

_WHOLE = "overlap_whole"
_AXIS = "overlap_axis"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Mark(AbstractContextManager[None], Protocol):
    """What `annotate` returns: a context manager that is a decorator as well."""

    def __call__(self, func: _Function, /) -> _Function: ...


def annotate(name: str, *, slice: bool = True, axis: str = "auto") -> Mark:
    """Mark a part of a model, as a context manager around it or a decorator of a function.

    name: how the report and remarks call it, beside the module that it is in.
    slice: False leaves it whole: slices are joined before it and cut again behind it. An exchange
        that begins or ends in it is not sliced.
    axis: along what its exchanges are sliced, whatever the program's axis is: "batch", "token" or
        "expert"; "auto" leaves that to the option `axis`.

    Raises ConfigError for a name that is no text, an axis that there is not, and an axis for what
    is not sliced.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"annotate expects a name for the region, found {name!r}")
    if axis not in AXES:
        raise unknown_name("value", str(axis), AXES, place=f"of axis for region {name!r}")
    if not slice and axis != "auto":
        raise ConfigError(f"region {name!r} has axis={axis!r} and slice=False; leave one out")
    marks: dict[str, Any] = {graph.REGION_KEY: name}
    if not slice:
        marks[_WHOLE] = name
    if axis != "auto":
        marks[_AXIS] = axis
    return traceback.annotate(marks)  # pyright: ignore[reportReturnType]


def left_whole(node: fx.Node) -> str:
    """The region that leaves a node whole, "" where none does."""
    return graph.annotation(node, _WHOLE) or "" if node.op != "placeholder" else ""


@dataclasses.dataclass(frozen=True)
class Scope:
    """What one plan may slice: along `axis`, in a program whose axis is `program_axis` wherever no
    region says otherwise."""

    axis: str
    program_axis: str

    def has(self, node: fx.Node) -> bool:
        """Whether the plan may slice a node: not another axis's, and not sliced already. Along
        tokens and experts, what is around an exchange belongs to it, wherever a region begins."""
        asked = graph.annotation(node, _AXIS)
        if self.axis == "batch" or collectives.is_start(node):
            asked = asked or self.program_axis
        return graph.tag_of(node).slice is None and asked in (None, self.axis)

    def is_of_other_islands(self, node: fx.Node) -> bool:
        """Whether a node is where islands are sliced along another axis than this plan's."""
        asked = graph.annotation(node, _AXIS) or self.program_axis
        return asked not in (self.axis, "batch")


def scopes(nodes: Sequence[fx.Node], program_axis: str) -> list[Scope]:
    """The scopes that cover a program, in the order in which it is cut: islands first, then the
    rest around them, if there is anything to cut in it."""
    asked = {graph.annotation(node, _AXIS) for node in nodes if node.op != "placeholder"} - {None}
    rest = Scope(program_axis, program_axis)
    if not asked or any(rest.has(node) for node in filter(collectives.is_start, nodes)):
        asked.add(program_axis)
    return [Scope(axis, program_axis) for axis in ("expert", "token", "batch") if axis in asked]
