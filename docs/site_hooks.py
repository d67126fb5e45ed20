"""Hooks of the site: the page on the command line gets every command's --help while it is built."""

from __future__ import annotations

from typing import Any

import typer

from bnexport.cli.application import app
from bnexport.cli.common import PLACES

MARK = "<!-- help -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the help of all commands in the place of the mark."""
    return markdown.replace(MARK, render()) if MARK in markdown else markdown


def render() -> str:
    """Return a block for each command, in the order of the work, closed until a reader opens it."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts = []
    for name in sorted(PLACES, key=PLACES.__getitem__):
        context = commands[name].context_class(commands[name], info_name=f"bnexport {name}", terminal_width=100)
        text = "\n".join(line.rstrip() for line in commands[name].get_help(context).splitlines())
        parts.append(
            f'<details markdown="1">\n<summary>bnexport {name} --help</summary>\n\n```text\n{text}\n```\n\n</details>\n'
        )
    return "\n".join(parts)
