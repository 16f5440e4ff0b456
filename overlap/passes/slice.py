"""slice: the forward is instantiated once per slice of the batch; results are joined where asked.

    before   h = linear(x, w);  a = all_to_all(h[order]);  ...;  loss = mean(y)
    after    x0, x1 = split(x)
             h0 = linear(x0, w);  h1 = linear(x1, w)
             a0 = all_to_all(h0[order0]);  a1 = all_to_all(h1[order1]);  ...
             loss = mean(cat(y0, y1))

Why it is correct: every value has a proven placement on the slice axis (`overlap.slicing`), and
autograd derives the backward of the sliced program itself. What has no proof is computed once, on
joined values; where its operands cannot be joined, the exchange they belong to stays un-sliced.

Cost: one launch per node and slice; a copy per join.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from overlap import islands, slicing
from overlap.errors import PassError
from overlap.graph import Phase
from overlap.instantiate import instantiate
from overlap.pipeline import Context, Effect
from overlap.slicing import Plan

ANALYSES: dict[str, Callable[[fx.GraphModule], Plan]] = {
    "batch": slicing.analyse,
    "token": islands.analyse_tokens,
    "expert": islands.analyse_experts,
}


@dataclasses.dataclass(frozen=True)
class Sliced:
    """What slicing did, for the report.

    starts: names of the collectives of the program as written that run once per slice.
    reassociated: the sums that slicing reassociates.
    """

    starts: tuple[str, ...]
    reassociated: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Slice:
    """Slice along `axis` into `slices` parts; 1 leaves the graph alone."""

    slices: int
    axis: str = "batch"
    name: str = "slice"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        if self.slices == 1:
            return
        try:
            plan = ANALYSES[self.axis](gm)
            sliced = self._apply(gm, ctx, plan)
        except PassError as error:
            if ctx.config.strict:
                raise
            ctx.remark("refused", f"nothing is sliced: {error}")
            return
        ctx.provide(sliced)

    def _apply(self, gm: fx.GraphModule, ctx: Context, plan: Plan) -> Sliced:
        for refused in plan.remarks:
            ctx.remark("refused", refused.message, refused.node, refused.advice)
        if not plan.sliced_starts:
            if not plan.remarks:
                ctx.remark("note", "no collective reads rows of the batch, so nothing is sliced")
            return Sliced((), ())
        instantiate(gm, plan, self.slices)
        for node, decision in plan.decisions.items():
            if decision.note and not decision.once:
                ctx.remark("note", decision.note, node)
        return Sliced(plan.sliced_starts, plan.reassociated)
