from __future__ import annotations

import pytest

from overlap import errors
from overlap.errors import unknown_name


def test_a_near_name_is_suggested():
    error = unknown_name("option", "slice", ["slices", "axis"])
    assert str(error) == "no option 'slice'; did you mean 'slices'? the options are: axis, slices"


def test_a_far_name_is_not_suggested():
    error = unknown_name("preset", "zzz", ["moe", "auto"])
    assert str(error) == "no preset 'zzz'; the presets are: auto, moe"


def test_the_place_follows_the_name():
    error = unknown_name("pass", "sink", ["hoist"], place="in preset 'moe'")
    assert str(error) == "no pass 'sink' in preset 'moe'; the passes are: hoist"


@pytest.mark.parametrize(
    "name", ["ConfigError", "PassError", "VerifyError", "RankError", "DivergenceError"]
)
def test_one_base_catches_every_error(name: str):
    assert issubclass(getattr(errors, name), errors.OverlapError)
