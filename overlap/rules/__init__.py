"""Placement rules of ATen operators, one family a file; importing this package registers them."""

from overlap.rules import (  # noqa: F401
    contraction,
    elementwise,
    indexing,
    reduction,
    routing,
    scalars,
    shape,
)
