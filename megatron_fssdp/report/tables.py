"""Tables of text, which pages and terminals show."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table as TerminalTable


@dataclass(frozen=True)
class Table:
    """A table of text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # the first cell is the row's name
    prose: frozenset[str] = frozenset()  # columns after the first that hold words instead of numbers

    def columns(self, *wanted: int) -> "Table":
        """Return a table of some of the columns, by their positions."""
        rows = tuple(tuple(row[i] for i in wanted) for row in self.rows)
        return Table(tuple(self.header[i] for i in wanted), rows, self.prose)


def terminal_table(
    table: Table, title: str = "", caption: str = "", whole: Collection[str] = ()
) -> TerminalTable:
    """Return a table for the terminal. Only columns that ``whole`` names never wrap."""
    shown = TerminalTable(title=title or None, caption=caption or None, box=box.SIMPLE_HEAD, pad_edge=False)
    shown.title_style, shown.title_justify, shown.caption_justify = "bold", "left", "left"
    for position, heading in enumerate(table.header):
        is_left = position == 0 or heading in table.prose
        justify: Literal["left", "right"] = "left" if is_left else "right"
        shown.add_column(heading, justify=justify, overflow="fold", no_wrap=heading in whole)
    for row in table.rows:
        shown.add_row(*row)
    return shown
