"""Tables as plain values, which print in a terminal and turn into HTML; figures for people."""

from __future__ import annotations

import dataclasses

from rich.console import RenderableType
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table as text: the first `num_left` columns are words, the others figures."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_left: int = 1

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i < self.num_left else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


def ms(us: float | None) -> str:
    """Microseconds as milliseconds; "-" for None."""
    if us is None:
        return "-"
    return f"{us / 1e3:.1f} ms" if us >= 1e3 else f"{us / 1e3:.2f} ms"


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"
