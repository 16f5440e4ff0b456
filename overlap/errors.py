"""The errors that users see: who is at fault, what was expected against found, and what to do.

ConfigError  the user's: an option, a preset, a target, an environment variable
PassError    the graph's: a pass met a program that it cannot handle
VerifyError  ours: a pass broke a rule of its phase
RankError    of a rank that failed, or of ranks that disagree
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OverlapError(Exception):
    """Base of every error that `overlap` raises on purpose."""


class ConfigError(OverlapError):
    """An option, preset, target or environment variable is wrong; nothing has run yet."""


class PassError(OverlapError):
    """A pass met a graph that it cannot handle; the graph is untouched."""


class VerifyError(OverlapError):
    """A pass broke a rule of its phase: a bug in `overlap`, with a reproducer."""


class RankError(OverlapError):
    """A rank failed, or ranks disagree; the message names the rank."""


class DivergenceError(RankError):
    """Ranks decided differently; raised before a collective that they would not share."""


def unknown_name(kind: str, name: str, valid: Iterable[str], place: str = "") -> ConfigError:
    """The error for a `name` that is none of `valid`: names the nearest one and lists them all.

    `place` says whose name it would be, as in "of option 'axis'"."""
    names = sorted(valid)
    nearest = difflib.get_close_matches(name, names, n=1)
    place = place and f" {place}"
    plural = f"{kind}es" if kind.endswith("s") else f"{kind}s"
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ";"
    return ConfigError(f"no {kind} {name!r}{place}{hint} the {plural} are: {', '.join(names)}")
