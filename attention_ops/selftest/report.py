"""Shows a run: a table and a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from attention_ops.selftest.results import Failure, Report, RouteReport
from attention_ops.selftest.runner import Progress
from attention_ops.verdicts import Verdict

SHOWN_FAILURES = 12
"""Failures printed per route; the JSON report and `--case` have the rest."""

_STYLES = {"passed": "green", "failed": "bold red", "unavailable": "yellow"}


def is_rich(stream: TextIO | None) -> bool:
    """Whether to draw: the stream is a terminal, and nobody asked for plain text (NO_COLOR, TERM=dumb)."""
    return stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def progress(stream: TextIO | None) -> Iterator[Progress]:
    """Give a function to call with cases done, cases in total and the route at hand."""
    if not is_rich(stream):
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("planning", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def show(report: Report, stream: TextIO = sys.stdout) -> None:
    """Print the verdicts, then the failures, then one line in sum."""
    if is_rich(stream):
        _show_table(report, stream)
    else:
        _show_lines(report, stream)
    for route in report.routes:
        for line in _failure_lines(route):
            print(line, file=stream)
    for route in report.routes:
        if route.caveat and route.status != "unavailable":
            print(f"{route.route}: {route.caveat}", file=stream)
    print(summary(report), file=stream)


def show_saved(file: pathlib.Path, standing: Iterable[Verdict], stream: TextIO = sys.stdout) -> None:
    """Print where verdicts were saved, and which older failures this run was too small to take back."""
    print(f"verdicts saved in {file}", file=stream)
    for verdict in standing:
        print(f"{verdict.route} passed, and stays refused: an older run failed ({verdict.reason}); {verdict.rerun}", file=stream)


def summary(report: Report) -> str:
    counts = {status: sum(route.status == status for route in report.routes) for status in _STYLES}
    cases = sum(route.cases for route in report.routes)
    verdicts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"attention_ops {report.version} on {report.device}: {verdicts} of {len(report.routes)} routes, {cases} cases"


def _cells(route: RouteReport) -> tuple[str, ...]:
    tested = route.status != "unavailable"
    cases = f"{route.cases - route.failed}/{route.cases}" if route.failed else str(route.cases)
    return (
        route.operation,
        route.route,
        route.status,
        route.proof,
        cases if tested else "-",
        _number(route.max_error) if tested and route.proof != "lowering" else "-",
        "-" if route.time_ratio is None else f"{route.time_ratio:.2f}x",
    )


def _number(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio < 1000 else f"{ratio:.1e}" if math.isfinite(ratio) else "inf"


_HEADS = ("operation", "route", "status", "proof", "cases", "error/tolerance", "time/vanilla")


def _show_table(report: Report, stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"attention_ops {report.version} on {report.device}", title_justify="left")
    for index, head in enumerate(_HEADS):
        table.add_column(head, justify="right" if index > 3 else "left", no_wrap=True)
    for route in report.routes:
        cells = list(_cells(route))
        cells[2] = f"[{_STYLES[route.status]}]{route.status}[/]"
        table.add_row(*cells)
    console = Console(file=stream)
    console.print(table)
    for route in report.routes:
        if route.status == "unavailable":
            console.print(f"{route.route}: {route.reason}", style="yellow", markup=False, highlight=False)


def _show_lines(report: Report, stream: TextIO) -> None:
    rows = [_HEADS, *(_cells(route) for route in report.routes)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    for row, route in zip(rows, (None, *report.routes), strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        reason = f"  {route.reason}" if route is not None and route.status == "unavailable" else ""
        print(line + reason, file=stream)


def _failure_lines(route: RouteReport) -> list[str]:
    if not route.failures:
        return [f"{route.route}: {route.reason}"] if route.status == "failed" else []
    lines = [f"{route.route}: {route.failed} of {route.cases} cases failed"]
    for failure in route.failures[:SHOWN_FAILURES]:
        lines += _described(failure)
    hidden = len(route.failures) - SHOWN_FAILURES
    return [*lines, f"  and {hidden} more; --json has the count, --case NAME runs one"] if hidden > 0 else lines


def _described(failure: Failure) -> list[str]:
    features = ", ".join(failure.features) or "plain"
    lines = [f"  {failure.case} [{features}]", f"    {failure.problem}"]
    lines += [f"    {failure.shapes}"] if failure.shapes else []
    return [*lines, f"    {failure.reproduce}"]
