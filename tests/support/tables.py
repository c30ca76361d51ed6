"""Tables in texts, for what has many rows of short cells."""

import textwrap


def cells(table, **names):
    """The cells of each row, as in ``cell | cell | cell``.

    Names in braces are replaced. Lines that are indented more go on with their row.
    """
    table = textwrap.dedent(table.format_map(names)).strip().replace("\n ", " ")
    return [[cell.strip() for cell in row.split("|")] for row in table.splitlines()]
