"""The pipelines: which passes run, in which order. Written once, here.

prepare     on the captured forward, before it is decided how to slice it
forward     on it after that, before autograd
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
from overlap.passes.rowwise_loss import RowwiseLoss
from overlap.passes.schedule import Schedule
from overlap.passes.simplify import Simplify
from overlap.passes.slice import Slice
from overlap.pipeline import Pass


@dataclasses.dataclass(frozen=True)
class Preset:
    prepare: tuple[Pass, ...]
    forward: tuple[Pass, ...]
    joint: tuple[Pass, ...]
    inference: tuple[Pass, ...]
    final: tuple[Pass, ...]


def prepare(whole_step: bool) -> tuple[Pass, ...]:
    """What slicing wants of a forward."""
    return (
        Functionalize(),  # slices read values, so a value is written once
        RowwiseLoss(is_on=whole_step),  # a slice's backward begins with its own loss
    )


def moe(slices: int, axis: str = "batch", whole_step: bool = False, exact: bool = False) -> Preset:
    """Slice, merge what slicing takes apart, hide every collective. For a whole step, slices of the
    batch stay apart through the loss, where their backward begins."""
    # Slices of experts leave every sum as it is, and so does a program that is not sliced.
    is_merged = not exact or (slices > 1 and axis != "expert")
    merge = (MergeWgrad(exact_slices=slices if exact else 0),) if is_merged else ()
    return Preset(
        prepare=prepare(whole_step),
        forward=(Slice(slices=slices, axis=axis, whole_step=whole_step, exact=exact),),
        joint=(
            Normalize(),  # joins that autograd's splits undo vanish
            Simplify(),
            *merge,
            Recompute(),  # the partitioner obeys the user's checkpointing
        ),
        inference=(Normalize(), Simplify()),
        final=(
            Schedule(),
            Legalize(),
        ),
    )


NONE = Preset((), (), (), (), ())

PASSES = {
    pass_.name: pass_
    for pass_ in (
        Functionalize,
        RowwiseLoss,
        Slice,
        Normalize,
        Simplify,
        MergeWgrad,
        Recompute,
        Schedule,
        Legalize,
    )
}
