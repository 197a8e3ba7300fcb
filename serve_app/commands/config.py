"""`moorage config`: every field of the configuration, its default and its meaning."""

from __future__ import annotations

from rich.table import Table

from serve_app.commands.console import console
from serve_app.config_table import groups, markdown, rows


def run(*, as_markdown: bool) -> int:
    if as_markdown:
        print(markdown(), end="")
        return 0
    for title, names in groups().items():
        table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
        for column in ("field", "default", "meaning"):
            table.add_column(column, overflow="fold")
        for row in rows(names):
            table.add_row(*row)
        console.print(table, markup=False)
        console.print()
    return 0
