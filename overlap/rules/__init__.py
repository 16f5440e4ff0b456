"""Placement rules of ATen operators, one family a file; importing this package registers them."""

from __future__ import annotations

import importlib

FAMILIES = (
    "contraction",
    "elementwise",
    "indexing",
    "reduction",
    "routing",
    "scalars",
    "shape",
)

for _family in FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
