"""`Config`: every option that a user can set, validated where it is made.

The same fields are the keys of `torch.compile(..., options={...})` and the `--overlap.*` flags.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from overlap.errors import ConfigError, unknown_name

PRESETS = ("auto", "moe", "fsdp", "none")
AXES = ("auto", "batch", "token", "expert")
NUMERICS = ("reassociate", "exact")
INNERS = ("auto", "eager", "inductor")

_CHOICES = {"preset": PRESETS, "axis": AXES, "numerics": NUMERICS, "inner": INNERS}
_QUANTILE = re.compile(r"p(100|\d{1,2}(\.\d+)?)")
_NOT_YET = {
    ("preset", "fsdp"): "use preset='moe', which slices and schedules every collective",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of one compilation.

    preset: which pipeline; "auto" is "moe" for a graph with an all-to-all, "none" leaves the graph
        alone.
    slices: how many slices, or "auto": the fastest forecast; 1 schedules without slicing.
    axis: what a slice is cut along: "batch", rows of the inputs, which stay apart through the whole
        program; "token", the tokens of each routed exchange; "expert", each rank's experts; or
        "auto", the fastest forecast.
    numerics: "reassociate" lets sums over sliced rows be reassociated, in fp32 or better, and the
        report lists them; "exact" slices only what keeps every bit of the loss and of all
        gradients, and leaves the rest as it is, with the reason. It goes by the certificate that
        `overlap hardware --probe` makes; with axis "auto" it slices experts where there are any.
    memory_budget: peak while scheduling: bytes (an int), a ratio of the un-scheduled peak (a
        float, at least 1.0), or None for no limit.
    bucket_bytes: size of a bucket of small collectives, or "auto".
    whole_step: run forward, loss and backward as one graph when the forward is called; for a
        function that returns its loss.
    hardware: name of a hardware profile, a path to one, or "auto".
    inner: who generates the compute kernels, "eager" or "inductor"; "auto" is eager on the CPU and
        Inductor on a GPU.
    strict: a refused overlap is an error instead of a remark.
    costs: path of a cost table, or None for the profile's formulas.
    skew: the routing to choose for: so many times its even share the busiest rank gets (a number,
        at least 1), or a quantile of what the cost table saw, as "p90"; None: as it was when the
        table was measured, and even by formulas.
    check_steps: how many first steps are compared with the program as written.
    artifact: a precompiled artifact.

    Raises ConfigError for a value that is not one of these or is not built yet.
    """

    preset: str = "auto"
    slices: int | str = "auto"
    axis: str = "auto"
    numerics: str = "reassociate"
    memory_budget: int | float | None = 1.05
    bucket_bytes: int | str = "auto"
    whole_step: bool = False
    hardware: str = "auto"
    inner: str = "auto"
    strict: bool = False
    costs: str | None = None
    skew: float | str | None = None
    check_steps: int = 0
    artifact: str | None = None

    def __post_init__(self) -> None:
        for field, valid in _CHOICES.items():
            value = getattr(self, field)
            if value not in valid:
                raise unknown_name("value", str(value), valid, place=f"of option '{field}'")
            if advice := _NOT_YET.get((field, value)):
                raise ConfigError(f"{field}={value!r} is not built yet; {advice}")
        if self.inner == "inductor" and self.numerics == "exact":
            raise ConfigError(
                "inner='inductor' rounds otherwise than the program as written, which "
                "numerics='exact' does not allow; use inner='eager'"
            )
        if self.whole_step and self.numerics == "exact":
            raise ConfigError(
                "whole_step=True multiplies gradients by the tangent last, which rounds otherwise "
                "than numerics='exact' allows; use one of the two"
            )
        _check_count("slices", self.slices, minimum=1, or_auto=True)
        _check_count("bucket_bytes", self.bucket_bytes, minimum=1, or_auto=True)
        _check_count("check_steps", self.check_steps, minimum=0)
        for field in ("strict", "whole_step"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise ConfigError(f"option {field!r} expects a bool, found {value!r}")
        if not isinstance(self.hardware, str):
            raise ConfigError(
                f"option 'hardware' expects a profile name or a path, found {self.hardware!r}"
            )
        _check_budget(self.memory_budget)
        if self.costs is not None and not isinstance(self.costs, str):
            raise ConfigError(f"option 'costs' expects a path or None, found {self.costs!r}")
        _check_skew(self.skew, self.costs)
        if self.artifact is not None:
            raise ConfigError("artifact= is not built yet; leave it at None")

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Config:
        """The config for `options=` of torch.compile; unknown keys are a ConfigError."""
        valid = [field.name for field in dataclasses.fields(cls)]
        for name in options or {}:
            if name not in valid:
                raise unknown_name("option", name, valid, place="for backend 'overlap'")
        return cls(**dict(options or {}))


def _check_count(field: str, value: object, minimum: int, or_auto: bool = False) -> None:
    if or_auto and value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        auto = " or 'auto'" if or_auto else ""
        raise ConfigError(f"option {field!r} expects an int >= {minimum}{auto}, found {value!r}")


def _check_skew(skew: object, costs: str | None) -> None:
    match skew:
        case None:
            return
        case str() if _QUANTILE.fullmatch(skew):
            if costs is None:
                raise ConfigError(
                    f"skew={skew!r} is a quantile of what a cost table saw; give costs= too, or a "
                    "number"
                )
            return
        case bool():
            pass
        case int() | float() if 1.0 <= skew < math.inf:
            return
    raise ConfigError(
        f"option 'skew' expects a number >= 1, a quantile as 'p90' or None, found {skew!r}"
    )


def _check_budget(budget: object) -> None:
    match budget:
        case None:
            return
        case bool():
            pass
        case int() if budget > 0:
            return
        case float() if 1.0 <= budget < math.inf:
            return
    raise ConfigError(
        "option 'memory_budget' expects bytes (an int > 0), a ratio (a float >= 1.0) or None, "
        f"found {budget!r}"
    )
