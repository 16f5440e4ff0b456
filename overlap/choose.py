"""Which axis and how many slices: every combination that is open is forecast, the fastest taken.

Rank-invariant: a forecast knows nominal sizes and the profile, nothing of one rank's batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

from torch import fx

from overlap import collectives, forecast, islands
from overlap.certificate import Certificate
from overlap.config import Config
from overlap.errors import PassError
from overlap.forecast import Setting
from overlap.passes.slice import ANALYSES, plan_of
from overlap.slicing import Plan
from overlap.tables import ms

CANDIDATE_SLICES = (2, 4)
LEAST_GAIN = 1.03
"""A predicted speed-up below this is within the error of the formulas: leave the program alone."""
_AS_GOOD = 1.01
"""Of forecasts that differ by less, the one with fewer slices compiles sooner."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to slice a program, and how long its step would take."""

    axis: str
    slices: int
    predicted_us: float

    def __str__(self) -> str:
        return f"{self.slices} slices along {self.axis} {ms(self.predicted_us)}"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was taken, and what was forecast on the way.

    unsliced_us: forecast of the program as written, scheduled; None if nothing was forecast.
    candidates: the ways to slice it, in the order of preference of equal ones.
    """

    axis: str
    slices: int
    unsliced_us: float | None = None
    candidates: tuple[Candidate, ...] = ()

    @property
    def reason(self) -> str:
        """Why the program is left un-sliced; "" if it is not, or was not meant to be sliced."""
        if self.slices > 1 or self.unsliced_us is None or not self.candidates:
            return ""
        best = min(self.candidates, key=lambda candidate: candidate.predicted_us)
        return (
            f"nothing is sliced: forecast are {ms(self.unsliced_us)} a step un-sliced, and "
            f"at best {best}"
        )


def best_slices(predicted_us: Mapping[int, float]) -> int:
    """The number of slices whose step is predicted to be shortest; 1 where that gains nothing."""
    best = min(predicted_us, key=lambda slices: (predicted_us[slices], slices))
    is_gain = 1 not in predicted_us or predicted_us[1] >= LEAST_GAIN * predicted_us[best]
    return best if is_gain else 1


def choose(
    gm: fx.GraphModule,
    config: Config,
    setting: Setting,
    is_trained: bool,
    exact: Certificate | None = None,
) -> Choice:
    """The axis and the number of slices for the forward `gm`; what `config` fixes stays fixed.

    exact: what plans go by that change no bit; None if they may.
    """
    axes = tuple(ANALYSES) if config.axis == "auto" else (config.axis,)
    if exact is not None and config.axis == "auto":
        # Rows of a batch meet in the experts' sums; slices of experts leave them as they are.
        axes = ("expert",) if islands.is_routed(gm) else ("batch",)
    if isinstance(config.slices, int) and (config.slices == 1 or len(axes) == 1):
        return Choice(axes[0], config.slices)
    if not collectives.has_collective(gm):
        return Choice(axes[0], 1)
    counts = (config.slices,) if isinstance(config.slices, int) else CANDIDATE_SLICES
    predict = functools.partial(
        forecast.step_us, setting=setting, is_trained=is_trained, is_whole_step=config.whole_step
    )
    found = tuple(_candidates(gm, axes, counts, config.whole_step, exact, predict))
    if not found:  # slicing says why not
        return Choice(axes[0], counts[0])
    unsliced_us = predict(gm, None, 1)
    best_us = min(candidate.predicted_us for candidate in found)
    if not isinstance(config.slices, int) and unsliced_us < LEAST_GAIN * best_us:
        return Choice(found[0].axis, 1, unsliced_us, found)
    best = min(
        (candidate for candidate in found if candidate.predicted_us <= _AS_GOOD * best_us),
        key=lambda candidate: candidate.slices,
    )
    return Choice(best.axis, best.slices, unsliced_us, found)


def _candidates(
    gm: fx.GraphModule,
    axes: tuple[str, ...],
    counts: tuple[int, ...],
    whole_step: bool,
    exact: Certificate | None,
    predict: Callable[[fx.GraphModule, Plan, int], float],
) -> Iterator[Candidate]:
    for axis in axes:
        try:
            plan = plan_of(gm, axis, whole_step, exact=exact)
        except PassError:
            continue
        if plan.sliced_starts:
            for slices in counts:
                yield Candidate(axis, slices, predict(gm, plan, slices))
