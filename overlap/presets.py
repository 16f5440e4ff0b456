"""The pipelines: which passes run, in which order. Written once, here.

forward     on the captured forward, before autograd
joint       on the joint forward and backward, before they are partitioned
inference   on a forward that has no backward
final       on each graph that runs
"""

from __future__ import annotations

import dataclasses

from overlap.passes.functionalize import Functionalize
from overlap.passes.legalize import Legalize
from overlap.passes.merge_wgrad import MergeWgrad
from overlap.passes.normalize import Normalize
from overlap.passes.recompute import Recompute
from overlap.passes.schedule import Schedule
from overlap.passes.simplify import Simplify
from overlap.passes.slice import Slice
from overlap.pipeline import Pass


@dataclasses.dataclass(frozen=True)
class Preset:
    forward: tuple[Pass, ...]
    joint: tuple[Pass, ...]
    inference: tuple[Pass, ...]
    final: tuple[Pass, ...]


def moe(slices: int, axis: str = "batch") -> Preset:
    """Slice, merge what slicing takes apart, hide every collective."""
    return Preset(
        forward=(
            Functionalize(),  # slices read values, so a value is written once
            Slice(slices=slices, axis=axis),
        ),
        joint=(
            Normalize(),  # joins that autograd's splits undo vanish
            Simplify(),
            MergeWgrad(),
            Recompute(),  # the partitioner obeys the user's checkpointing
        ),
        inference=(Normalize(), Simplify()),
        final=(
            Schedule(),
            Legalize(),
        ),
    )


NONE = Preset((), (), (), ())

PASSES = {
    pass_.name: pass_
    for pass_ in (
        Functionalize,
        Slice,
        Normalize,
        Simplify,
        MergeWgrad,
        Recompute,
        Schedule,
        Legalize,
    )
}
