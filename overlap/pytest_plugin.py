"""The pytest plugin: a fixture for golden tests (see `overlap.testing`), there wherever `overlap`
is installed.

    def test_layer_keeps_its_overlap(overlap_golden):
        overlap_golden(model, (x,))

pytest imports this file in every session, so it imports torch only when the fixture is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from overlap.config import Config

_MARKER = (
    "overlap_golden: compares a compiled program; EXPECTTEST_ACCEPT=1 pytest writes the golden"
)


class OverlapGolden(Protocol):
    """The fixture's type: `assert_overlap_golden` with a name and a directory of its own."""

    def __call__(
        self,
        model_or_step: Any,
        inputs: Sequence[Any],
        *,
        name: str | None = None,
        config: Config | None = None,
    ) -> None: ...


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the fixture, so that `pytest -m overlap_golden` runs the golden tests."""
    for item in items:
        if isinstance(item, pytest.Function) and "overlap_golden" in item.fixturenames:
            item.add_marker(pytest.mark.overlap_golden)


@pytest.fixture
def overlap_golden(request: pytest.FixtureRequest) -> OverlapGolden:
    """Compare a compiled program with `golden/<test name>.graph` beside the test file.

    Call it with a model, or a function, and its inputs; `name=` names another golden, `config=` is
    an `overlap.Config`. EXPECTTEST_ACCEPT=1 pytest writes the golden.
    """
    from overlap.testing import assert_overlap_golden

    def check(
        model_or_step: Any,
        inputs: Sequence[Any],
        *,
        name: str | None = None,
        config: Config | None = None,
    ) -> None:
        own_name = re.sub(r"[^\w.-]+", "-", request.node.name.removeprefix("test_")).strip("-")
        directory = request.path.parent / "golden"
        assert_overlap_golden(
            model_or_step, inputs, name=name or own_name, config=config, directory=directory
        )

    return check
