"""Tables of results, and the same as HTML: for the command line, its pages and notebooks. No script, nothing loaded."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>bnexport</title>
<style>
  :root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }}
  body {{ max-width: 75em; margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere; }}
  table {{ border-collapse: collapse; margin: 1.5em 0; }}
  caption {{ text-align: left; font-weight: bold; }}
  th, td {{ text-align: left; vertical-align: top; padding: 0.2em 0.8em 0.2em 0; border-bottom: 1px solid #8884; }}
  .number {{ text-align: right; white-space: nowrap; }}
</style>
{}
</html>
"""


def plain(text: object) -> str:
    """Text from a model file, without characters that steer a terminal."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in str(text))


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> Table:
    """Make a table, without a heading where no column has a name.

    Columns in `right` hold numbers; those in `whole` are broken last, where the console is narrower than they are.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(title=plain(title), title_justify="left", show_header=any(columns))
    for name in columns:
        justify: Any = "right" if name in right else "left"
        made.add_column(plain(name), overflow="fold", justify=justify, no_wrap=name in whole)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in row))
    return made


def fragment(lines: Iterable[str], tables: Iterable[Table]) -> str:
    """Return lines and tables as HTML for a page or a notebook."""

    def cells(kind: str, texts: Iterable[Any], columns: Sequence[Any]) -> str:
        made = ((html.escape(plain(text)), column.justify == "right") for text, column in zip(texts, columns))
        return "".join(f"<{kind}{' class=number' * right}>{text}</{kind}>" for text, right in made)

    body = [f"<p>{html.escape(plain(line))}</p>" for line in lines]
    for each in tables:
        columns, rows = each.columns, zip(*(column._cells for column in each.columns))
        body.append(f"<table>{f'<caption>{html.escape(plain(each.title))}</caption>' if each.title else ''}")
        body.append(f"<tr>{cells('th', (column.header for column in columns), columns)}</tr>")
        body += [f"<tr>{cells('td', row, columns)}</tr>" for row in rows]
        body.append("</table>")
    return "\n".join(body)


def page(lines: Iterable[str], tables: Iterable[Table]) -> str:
    """Return lines and tables as a page of its own."""
    return _PAGE.format(fragment(lines, tables))
