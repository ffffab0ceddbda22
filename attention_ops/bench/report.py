"""Print results: rich tables on a terminal, plain lines elsewhere, with the same columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from attention_ops.bench.cases import OVERHEAD, OWN_CAUSAL, PEAK
from attention_ops.bench.results import JITTED, CaseResult, Comparison, Measurement

_STYLES = {"met": "green", "missed": "red"}
_SEPARATOR = "  "


@dataclasses.dataclass(frozen=True)
class Row:
    """One system on one row of the table, as text. `ratios` has a cell and its verdict for each of our operations."""

    system: str
    median: str
    spread: str
    rate: str
    ratios: tuple[tuple[str, str], ...]
    target: str
    peak: str
    remarks: str

    def cells(self) -> list[str]:
        ratios = [f"{text} {verdict}".strip() for text, verdict in self.ratios]
        return [self.system, self.median, self.spread, self.rate, *ratios, self.target, self.peak]


def headings(operations: Sequence[str]) -> list[str]:
    """Return the columns: a ratio is our operation over the system of the line."""
    ratios = [f"{name} / it" for name in operations]
    return ["system", "median", "min to max", "GFLOP/s", *ratios, "target", "peak, above inputs"]


def rows(result: CaseResult, operations: Sequence[str]) -> list[Row]:
    """Return the lines of one row of the table, ours first."""
    return [_row(result, m, operations) for m in result.measurements]


def _row(result: CaseResult, m: Measurement, operations: Sequence[str]) -> Row:
    seconds = m.samples.seconds
    median = min_max = rate = peak = ""
    if seconds:
        median, min_max = duration(m.samples.median), _spread(min(seconds), max(seconds))
        is_rated = result.case.kind != "dispatch" and m.system not in (OWN_CAUSAL, "read")
        rate = f"{result.flops / m.samples.median / 1e9:.3g}" if is_rated else ""
    elif result.case.timed:
        median = "none"
    if m.peak and m.peak.total is not None and m.peak.above_inputs is not None:
        peak = f"{size(m.peak.total)}, {size(m.peak.above_inputs)}"
    found = [_comparison(result, name, m) for name in operations]
    target = next((c for c in found if c and c.at_most is not None), None)
    return Row(
        m.label,
        median,
        min_max,
        rate,
        tuple((value(c), _met(c)) if c else ("", "") for c in found),
        _target(target) if target else "",
        peak,
        "; ".join(m.remarks(result.case.dtype)),
    )


def _comparison(result: CaseResult, operation: str, m: Measurement) -> Comparison | None:
    """Return what stands in the column of one of our operations, on the line of a system."""
    against = {operation + JITTED: OVERHEAD, operation: PEAK}.get(m.system, m.system)
    found = next((c for c in result.comparisons if c.ours == operation and c.against == against), None)
    return None if found and against == PEAK and found.at_most is None else found


def _met(comparison: Comparison) -> str:
    """The verdict in a word; the aim stands beside it."""
    return {"": "", "missed": "missed"}.get(comparison.verdict, "met")


def value(comparison: Comparison) -> str:
    """Return a ratio, or a quantity with its unit."""
    if math.isnan(comparison.value):
        return "-"
    return _quantity(comparison.against, comparison.value)


def _quantity(against: str, number: float) -> str:
    if against == OVERHEAD:
        return f"+{duration(number)}"
    return size(number) if against == PEAK else f"{number:.3f}" if number < 0.1 else f"{number:.2f}"


def _target(comparison: Comparison) -> str:
    assert comparison.at_most is not None
    aim = "" if comparison.aim is None else f", aim {_quantity(comparison.against, comparison.aim)}"
    return f"<= {_quantity(comparison.against, comparison.at_most)}{aim}"


def duration(seconds: float) -> str:
    """Return seconds with a unit and three digits.

    >>> duration(0.1234), duration(2.5e-5), duration(12.345)
    ('123 ms', '25 us', '12.3 s')
    """
    unit, factor = _unit(seconds)
    return f"{seconds * factor:.3g} {unit}"


def _unit(seconds: float) -> tuple[str, float]:
    return next(((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if abs(seconds) * factor >= 0.9995), ("us", 1e6))


def _spread(least: float, most: float) -> str:
    (unit, factor), (other, _) = _unit(least), _unit(most)
    return f"{least * factor:.3g} to {duration(most)}" if unit == other else f"{duration(least)} to {duration(most)}"


def size(count: float) -> str:
    """Return bytes with a decimal unit.

    >>> size(3e9), size(4_200_000)
    ('3.00 GB', '4 MB')
    """
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def plain(result: CaseResult, operations: Sequence[str]) -> str:
    """Return one row of the table as aligned lines, remarks at their end."""
    lines = rows(result, operations)
    table = [[*headings(operations), ""], *([*row.cells(), row.remarks] for row in lines)]
    return f"{result.case.name}: {result.case.title}\n{_aligned(table)}"


def _used(table: list[list[str]]) -> list[int]:
    """Return the columns in which a line below the headings has something."""
    return [index for index in range(len(table[0])) if any(line[index] for line in table[1:])]


def _aligned(table: list[list[str]]) -> str:
    used = _used(table)
    widths = [max(len(line[index]) for line in table) for index in used]
    cells = ([line[index].ljust(width) for index, width in zip(used, widths, strict=True)] for line in table)
    return "\n".join(f"  {_SEPARATOR.join(line).rstrip()}" for line in cells)


def rich_table(result: CaseResult, operations: Sequence[str]) -> Any:
    """Return one row of the table for a terminal, remarks below."""
    from rich import box
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    lines, names = rows(result, operations), headings(operations)
    used = _used([names, *(row.cells() for row in lines)])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for index in used:
        table.add_column(names[index], justify="left" if index == 0 else "right")
    for row in lines:
        styles = ["", "", "dim", "", *(_STYLES.get(verdict, "") for _, verdict in row.ratios), "dim", ""]
        cells = row.cells()
        table.add_row(*(Text(cells[index], style=styles[index]) for index in used))
    title = Text.assemble((result.case.name, "bold"), "  ", result.case.title)
    remarks = [Padding(Text(f"{row.system}: {row.remarks}", style="dim"), (0, 0, 0, 1)) for row in lines if row.remarks]
    return Group(title, table, *remarks, "")


def plain_summary(results: Sequence[CaseResult]) -> str:
    """Return every target that applies, what was reached, and how many were met."""
    judged = [(result.case.name, c) for result in results for c in result.verdicts]
    if not judged:
        return "No row was measured that has a target at this size."
    table = [["row", "ours", "against", "value", "target", "verdict"]]
    table += [[name, c.ours, c.against, value(c), _target(c), c.verdict] for name, c in judged]
    missed, unknown = (sum(c.verdict == verdict for _, c in judged) for verdict in ("missed", "not measured"))
    return f"targets: {len(judged) - missed - unknown} met, {missed} missed, {unknown} not measured\n{_aligned(table)}"
