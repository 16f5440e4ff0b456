from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from overlap.config import Config
from overlap.errors import ConfigError

EXPECTED: list[tuple[dict[str, Any], str]] = [
    (
        {"slice": 2},
        "no option 'slice' for backend 'overlap'; did you mean 'slices'? the options are: artifact, "
        "axis, bucket_bytes, check_steps, costs, hardware, inner, memory_budget, numerics, preset, "
        "skew, slices, strict, whole_step",
    ),
    (
        {"preset": "meo"},
        "no value 'meo' of option 'preset'; did you mean 'moe'? the values are: auto, fsdp, moe, none",
    ),
    (
        {"axis": "rows"},
        "no value 'rows' of option 'axis'; the values are: auto, batch, expert, token",
    ),
    (
        {"numerics": "exactly"},
        "no value 'exactly' of option 'numerics'; did you mean 'exact'? the values are: exact, "
        "reassociate",
    ),
    (
        {"inner": "triton"},
        "no value 'triton' of option 'inner'; the values are: auto, eager, inductor",
    ),
    ({"slices": 0}, "option 'slices' expects an int >= 1 or 'auto', found 0"),
    ({"slices": True}, "option 'slices' expects an int >= 1 or 'auto', found True"),
    ({"slices": "two"}, "option 'slices' expects an int >= 1 or 'auto', found 'two'"),
    ({"bucket_bytes": -1}, "option 'bucket_bytes' expects an int >= 1 or 'auto', found -1"),
    ({"check_steps": "auto"}, "option 'check_steps' expects an int >= 0, found 'auto'"),
    ({"strict": 1}, "option 'strict' expects a bool, found 1"),
    ({"whole_step": 1}, "option 'whole_step' expects a bool, found 1"),
    ({"hardware": None}, "option 'hardware' expects a profile name or a path, found None"),
    (
        {"memory_budget": 0.5},
        "option 'memory_budget' expects bytes (an int > 0), a ratio (a float >= 1.0) or None, "
        "found 0.5",
    ),
    (
        {"memory_budget": True},
        "option 'memory_budget' expects bytes (an int > 0), a ratio (a float >= 1.0) or None, "
        "found True",
    ),
]

NOT_YET: list[tuple[dict[str, Any], str]] = [
    (
        {"inner": "inductor", "numerics": "exact"},
        "inner='inductor' rounds otherwise than the program as written, which numerics='exact' does "
        "not allow; use inner='eager'",
    ),
    (
        {"preset": "fsdp"},
        "preset='fsdp' is not built yet; use preset='moe', which slices and schedules every "
        "collective",
    ),
    ({"costs": 3}, "option 'costs' expects a path or None, found 3"),
    ({"skew": 0.9}, "option 'skew' expects a number >= 1, a quantile as 'p90' or None, found 0.9"),
    (
        {"skew": "p101", "costs": "t.json"},
        "option 'skew' expects a number >= 1, a quantile as 'p90' or None, found 'p101'",
    ),
    (
        {"skew": "p90"},
        "skew='p90' is a quantile of what a cost table saw; give costs= too, or a number",
    ),
    ({"artifact": "step.overlap"}, "artifact= is not built yet; leave it at None"),
]


@pytest.mark.parametrize(("options", "expected"), EXPECTED + NOT_YET)
def test_what_is_wrong_is_a_config_error(options: dict[str, Any], expected: str):
    with pytest.raises(ConfigError) as error:
        Config.from_options(options)
    assert str(error.value) == expected


@pytest.mark.parametrize(
    "options",
    [
        None,
        {},
        {"slices": 4, "axis": "batch", "inner": "eager", "preset": "moe", "strict": True},
        {"memory_budget": 1_000_000, "bucket_bytes": 1, "check_steps": 3},
        {"memory_budget": None, "hardware": "h100", "numerics": "exact"},
    ],
)
def test_what_is_right_is_taken_as_it_is(options: dict[str, Any] | None):
    config = Config.from_options(options)
    assert {**dataclasses.asdict(Config()), **(options or {})} == dataclasses.asdict(config)


def test_every_field_is_documented():
    for field in dataclasses.fields(Config):
        assert f"\n    {field.name}: " in (Config.__doc__ or "")


def test_a_whole_step_is_not_exact() -> None:
    with pytest.raises(ConfigError, match="whole_step=True multiplies gradients"):
        Config(whole_step=True, numerics="exact")
