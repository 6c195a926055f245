"""One look for every table that a command prints."""

from collections.abc import Iterable, Sequence

import click
from rich import box
from rich.console import Console
from rich.table import Column, Table

UNBROKEN = 10_000
"""Columns of output that is no terminal: a row is one line, for grep and for logs, whatever its length."""


def print_table(columns: Sequence[Column | str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: ruled on a terminal, plain aligned text elsewhere. Cells are literal text, never markup."""
    console = Console(markup=False, emoji=False, highlight=False)
    table = Table(*columns, box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    if console.is_terminal:
        console.print(table)
        return
    console.width = UNBROKEN
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())
