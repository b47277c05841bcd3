"""Tables: rows of cells by the heads of their columns."""

import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table


def table(
    title: str, rows: Sequence[Mapping[str, str]], caption: str | None = None
) -> Table:
    """One row or more; a column that begins with a letter is words, else numbers."""
    out = Table(title=title, caption=caption)
    for head, cell in rows[0].items():
        out.add_column(head, justify="left" if cell[:1].isalpha() else "right")
    for row in rows:
        out.add_row(*row.values())
    return out


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and the deviation where there is more than one."""
    mean = statistics.fmean(values)
    if mean == float("inf"):
        return "diverged"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{deviation}"
