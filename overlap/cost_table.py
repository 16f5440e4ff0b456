"""Cost tables: what the calls of captured programs take, measured once and written to a file.

    overlap hardware --measure TARGET -o costs.json     measures, on the ranks of the job
    options={"costs": "costs.json"}                     every rank prices its graphs by the file

A table decides the order of collectives and the number of slices, so all ranks load the same one
and compare its digest. It is for the programs and the place that it was measured at; anything else
is refused with the field that differs. The file is JSON with sorted keys: equal tables are equal
bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from overlap.errors import ConfigError

FORMAT = 1
SKEWS = (1.0, 1.25, 1.5, 2.0, 3.0)
_DIGITS = 3  # of a nanosecond's thousand: no timer sees more
_AGAIN = "measure again with: overlap hardware --measure TARGET -o FILE"

_ACCEPTED = {"str": str, "int": int, "float": int | float, "tuple[float, ...]": tuple}

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a table was measured: what has to be the same where it is used.

    torch: its version. device: name of the processor. threads: of one rank.
    kernels: the code path that MKL is held to (MKL_CBWR), "" if it is free.
    ranks: of the whole job. backend: of its default group. link: of an emulated one, else "".
    """

    torch: str
    device: str
    threads: int
    kernels: str
    ranks: int
    backend: str
    link: str


@dataclasses.dataclass(frozen=True)
class Call:
    """What one distinct call of an operator, or one collective, takes; of the slowest rank.

    us, min_us: lower quartile over steps, and the least; averaged over the `num_calls` nodes that
        make the call. Host time to issue it is in `us`; for a collective it is `issue_us` alone.
    flops, num_bytes: its work, by which a call of another size is scaled; for a collective the
        bytes that one rank sends.
    """

    us: float
    min_us: float
    num_calls: int
    flops: float = 0.0
    num_bytes: float = 0.0
    issue_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Step:
    """A program in some number of slices, in microseconds: forward and backward together.

    predicted_us: as the simulator predicts them from this table.
    measured_us: as they were measured when the table was made (the lower quartile).
    skewed_us: predicted for a rank that receives SKEWS times as many routed rows as the busiest one
        did then, on average; empty: as predicted_us.
    """

    predicted_us: float
    measured_us: float
    skewed_us: tuple[float, ...] = ()

    def at_skew(self, skew: float) -> float:
        """The predicted time at another skew, between those that were simulated."""
        if not self.skewed_us:
            return self.predicted_us
        return float(np.interp(skew, SKEWS, self.skewed_us))


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Measured costs.

    place: where they were measured.
    dims: the nominal size of a symbolic dimension, by its index in a graph's inputs.
    axis: what it was sliced along.
    skews: of each routed exchange, how many times the even share of its rows the busiest rank had;
        ascending. The calls were measured at their mean.
    contention: compute beside communication takes 1 + contention times as long.
    programs: by the digest of a captured program (`agree.program_of`) and the number of slices.
    calls: by what they are; see `pricing.call_of`.
    """

    place: Place
    dims: Mapping[int, int]
    axis: str
    skews: tuple[float, ...]
    contention: float
    programs: Mapping[str, Mapping[int, Step]]
    calls: Mapping[str, Call]

    @functools.cached_property
    def text(self) -> str:
        """The table as its file holds it."""
        fields = {"format": FORMAT} | dataclasses.asdict(self)
        return json.dumps(_rounded(fields), sort_keys=True, indent=1) + "\n"

    @property
    def digest(self) -> str:
        """What tells this table from all others: the SHA-256 of its file."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def check(self, name: str, here: Mapping[str, Any], program: str, axis: str) -> None:
        """Raises ConfigError, naming the field, unless the table is for this place, program and
        axis.

        name: what messages call the table. here: the fields of `Place` that are known.
        """
        for field, found in here.items():
            expected = getattr(self.place, field)
            if expected != found:
                raise ConfigError(
                    f"cost table {name!r} is from another place: {field} is {expected!r} in the "
                    f"table and {found!r} here; {_AGAIN}"
                )
        if program not in self.programs:
            raise ConfigError(
                f"cost table {name!r} is for another graph: program is "
                f"{' or '.join(map(repr, self.programs))} in the table and {program!r} here; "
                f"{_AGAIN}"
            )
        if axis != self.axis:
            raise ConfigError(
                f"cost table {name!r} is for other slices: axis is {self.axis!r} in the table and "
                f"{axis!r} here; {_AGAIN} --axis {axis}"
            )

    def skew(self, wanted: float | str) -> float:
        """A skew, or a quantile of those that were seen (`p90`), relative to the table's own."""
        if isinstance(wanted, str):
            if not self.skews:
                raise ConfigError(
                    f"skew={wanted!r}: the cost table saw no routed exchange; give a number"
                )
            wanted = float(np.quantile(self.skews, float(wanted.removeprefix("p")) / 100))
        return wanted / (statistics.fmean(self.skews) if self.skews else 1.0)

    def save(self, path: Path) -> None:
        path.write_text(self.text)


def _rounded(value: Any) -> Any:
    """Plain data with finite digits, keys as JSON has them."""
    match value:
        case float():
            return round(value, _DIGITS)
        case dict():
            return {str(key): _rounded(item) for key, item in value.items()}
        case tuple():
            return [_rounded(item) for item in value]
        case _:
            return value


@functools.lru_cache(maxsize=8)
def _parse(text: str, name: str) -> CostTable:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"cost table {name!r} cannot be read: {error}; {_AGAIN}") from error
    found = fields.get("format") if isinstance(fields, dict) else None
    if found != FORMAT:
        raise ConfigError(f"cost table {name!r} has format {found!r}, expected {FORMAT}; {_AGAIN}")
    try:
        return CostTable(
            place=_value(Place, fields["place"]),
            dims={int(dim): int(size) for dim, size in fields["dims"].items()},
            axis=str(fields["axis"]),
            skews=tuple(map(float, fields["skews"])),
            contention=float(fields["contention"]),
            programs={
                program: {int(slices): _step(step) for slices, step in steps.items()}
                for program, steps in fields["programs"].items()
            },
            calls={call: _value(Call, figures) for call, figures in fields["calls"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"cost table {name!r} is damaged: {type(error).__name__}: {error}; {_AGAIN}"
        ) from error


def _step(fields: Mapping[str, Any]) -> Step:
    skewed_us = tuple(map(float, fields["skewed_us"]))
    if len(skewed_us) not in (0, len(SKEWS)):
        raise ValueError(f"skewed_us has {len(skewed_us)} figures, expected {len(SKEWS)}")
    figures = {name: us for name, us in fields.items() if name != "skewed_us"}
    return dataclasses.replace(_value(Step, figures), skewed_us=skewed_us)


def _value(kind: type[_T], fields: Mapping[str, Any]) -> _T:
    """A dataclass from plain data. Raises TypeError for a name too many or a value of another type
    than the field's."""
    value = kind(**fields)
    for field in dataclasses.fields(value):  # pyright: ignore[reportArgumentType]
        found = getattr(value, field.name)
        accepted = _ACCEPTED[str(field.type)]
        if not isinstance(found, accepted) or isinstance(found, bool):
            raise TypeError(f"{field.name} is {found!r}, expected {field.type}")
    return value


def load(path: str) -> CostTable:
    """The table in a file. Raises ConfigError if there is none, or none of this format."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cost table {path!r} cannot be read: {error}; {_AGAIN}") from error
    return _parse(text, path)
