"""Every command's --help in docs/command_line.md, between its markers: python -m docs.write_help."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from bnexport.cli.application import app
from bnexport.cli.help import PLACES

PAGE = Path(__file__).with_name("command_line.md")
BLOCK = re.compile(r"(?<=<!-- help: begin -->\n).*?(?=<!-- help: end -->)", re.DOTALL)


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


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: render(), PAGE.read_text()))
    print(f"{PAGE} written")
