"""slice: the forward, or each island, is instantiated once per slice; joined where asked.

    before   h = linear(x, w);  a = all_to_all(h[order]);  ...;  loss = mean(y)
    after    x0, x1 = split(x)
             h0 = linear(x0, w);  h1 = linear(x1, w)
             a0 = all_to_all(h0[order0]);  a1 = all_to_all(h1[order1]);  ...
             loss = mean(cat(y0, y1))

Why it is correct: every value has a proven placement on the axis (`overlap.slicing`), and
autograd derives the backward of the sliced program itself. What has no proof is computed once, on
joined values; where its operands cannot be joined, the exchange they belong to stays un-sliced.

Cost: one launch per node and slice; a copy per join.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from overlap import islands, regions, slicing
from overlap.certificate import Certificate
from overlap.errors import PassError
from overlap.graph import Phase
from overlap.instantiate import instantiate
from overlap.pipeline import Context, Effect
from overlap.regions import Scope
from overlap.slicing import Plan

ANALYSES: dict[str, Callable[..., Plan]] = {
    "batch": slicing.analyse,
    "token": islands.analyse_tokens,
    "expert": islands.analyse_experts,
}


def plan_of(
    gm: fx.GraphModule,
    axis: str,
    whole_step: bool = False,
    scope: Scope | None = None,
    exact: Certificate | None = None,
) -> Plan:
    """What slices along `axis` do. Raises PassError where there is nothing to slice."""
    if axis == "batch" and whole_step:
        return slicing.analyse(gm, scope, exact, trim_end=False)
    return ANALYSES[axis](gm, scope, exact)


@dataclasses.dataclass(frozen=True)
class Sliced:
    """What slicing did, for the report.

    axes: along what, in the order of the cuts.
    starts: names of the collectives of the program as written that run once per slice.
    reassociated: the sums that slicing reassociates.
    """

    axes: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    reassociated: tuple[str, ...] = ()

    def and_also(self, axis: str, plan: Plan) -> Sliced:
        """With what a further plan slices."""
        return Sliced(
            (*self.axes, axis),
            self.starts + plan.sliced_starts,
            self.reassociated + plan.reassociated,
        )


@dataclasses.dataclass(frozen=True)
class Slice:
    """Slice along `axis` into `slices` parts; 1 leaves the graph alone. Regions that users gave an
    axis of their own are sliced along that.

    whole_step: whether the backward will be in one graph with the forward, so that slices of the
        batch gain by staying apart behind their last collective.
    exact: slice so that the context's certificate vouches for every bit.
    """

    slices: int
    axis: str = "batch"
    whole_step: bool = False
    exact: bool = False
    name: str = "slice"
    effect: Effect = Effect.REWRITE
    requires: Phase = Phase.FORWARD
    ensures: Phase = Phase.FORWARD

    def run(self, gm: fx.GraphModule, ctx: Context) -> None:
        if self.slices == 1:
            return
        sliced = Sliced()
        exact = ctx.fact(Certificate) if self.exact else None
        scopes = regions.scopes(list(gm.graph.nodes), self.axis)
        for scope in scopes:
            try:
                plan = plan_of(gm, scope.axis, self.whole_step, scope, exact)
                _remark(ctx, plan, scope, is_only=len(scopes) == 1)
                if plan.sliced_starts:
                    instantiate(gm, plan, self.slices)
            except PassError as error:
                if ctx.config.strict:
                    raise
                along = f" along axis {scope.axis!r}" if len(scopes) > 1 else ""
                ctx.remark("refused", f"nothing is sliced{along}: {error}")
                continue
            if plan.sliced_starts:
                sliced = sliced.and_also(scope.axis, plan)
        ctx.provide(sliced)


def _remark(ctx: Context, plan: Plan, scope: Scope, is_only: bool) -> None:
    for refused in plan.remarks:
        kind = "note" if refused.is_asked else "refused"
        ctx.remark(kind, refused.message, refused.node, refused.advice)
    if plan.sliced_starts:
        for node, decision in plan.decisions.items():
            if decision.note and not decision.once:
                ctx.remark("note", decision.note, node)
    elif is_only and not plan.remarks:
        ctx.remark("note", "no collective reads rows of the batch, so nothing is sliced")
    elif scope.axis != scope.program_axis and not plan.remarks:
        ctx.remark(
            "refused",
            f"no collective in a region with axis={scope.axis!r} reads rows to slice along it",
        )
