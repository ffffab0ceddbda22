"""Output: at a terminal in its width and with colour, elsewhere plain and with nothing cut."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import click
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_UNLIMITED = 10_000


def emit(*parts: RenderableType) -> None:
    """Print rich renderables, or text as it is: brackets are no markup."""
    settings: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
    terminal = Console(file=sys.stdout, color_system=None if os.environ.get("NO_COLOR") else "auto", **settings)
    if terminal.is_terminal:
        for part in parts:
            terminal.print(part)
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    buffer = io.BytesIO()
    page = io.TextIOWrapper(buffer, encoding=encoding, errors="replace", write_through=True)  # its encoding decides on boxes
    plain = Console(file=page, width=_UNLIMITED, color_system=None, force_terminal=False, **settings)
    for part in parts:
        plain.print(part)
    for line in buffer.getvalue().decode(encoding).splitlines():
        click.echo(line.rstrip())


def table(*headers: str) -> Table:
    """Return an empty table whose cells are folded where the terminal is narrow, never cut."""
    new = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for header in headers:
        new.add_column(header, overflow="fold")
    return new


def facts(rows: dict[str, str]) -> Table:
    """Return names and what they hold, in two columns."""
    new = Table.grid(padding=(0, 2))
    new.add_column(style="dim", no_wrap=True)
    new.add_column(overflow="fold")
    for name, text in rows.items():
        new.add_row(name, text)
    return new


def styled(text: str, style: str) -> Text:
    return Text(text, style=style, overflow="fold")


def flops_text(flops: float) -> str:
    """Return a count of operations in a readable unit.

    >>> flops_text(34_359_738_368), flops_text(12)
    ('34.4 GFLOP', '12 FLOP')
    """
    return _scaled(flops, 1000, ("", "k", "M", "G", "T", "P", "E")) + "FLOP"


def bytes_text(count: float) -> str:
    """Return a number of bytes in a readable unit.

    >>> bytes_text(13_000_000), bytes_text(0)
    ('12.4 MiB', '0 B')
    """
    return _scaled(count, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")) + "B"


def _scaled(value: float, base: int, prefixes: tuple[str, ...]) -> str:
    step = 0
    while value >= base and step < len(prefixes) - 1:
        value, step = value / base, step + 1
    return f"{value:.0f} {prefixes[step]}" if value >= 100 or value == int(value) else f"{value:.3g} {prefixes[step]}"
