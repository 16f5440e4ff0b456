"""overlap: compiler passes that hide the communication of distributed training under its compute.

step = torch.compile(model, backend="overlap")
step(batch)
overlap.explain(step)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from overlap.collectives import Transport, register_transport
    from overlap.config import Config
    from overlap.cost import register_cost
    from overlap.placement import register_rule
    from overlap.regions import annotate
    from overlap.report import explain

_HOMES = {
    "annotate": "overlap.regions",
    "Config": "overlap.config",
    "explain": "overlap.report",
    "register_cost": "overlap.cost",
    "register_rule": "overlap.placement",
    "register_transport": "overlap.collectives",
    "Transport": "overlap.collectives",
}

__all__ = [
    "Config",
    "Transport",
    "__version__",
    "annotate",
    "explain",
    "register_cost",
    "register_rule",
    "register_transport",
]


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `import overlap` stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'overlap' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
