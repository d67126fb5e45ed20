"""The command that checks the installation."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.text import Text

from bnexport.cli.common import Json, app
from bnexport.cli.console import say
from bnexport.cli.output import check_targets, emit, table
from bnexport.errors import MissingDependencyError


@app.command(
    place=110,
    examples=(
        "bnexport doctor",
        "bnexport doctor --deep",
    ),
)
def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Import every package, torch too, and run an operator.")] = False,
    json_target: Json = None,
) -> None:
    """Checks the installation."""
    from bnexport.runtime.doctor import examine

    check_targets(json=json_target)
    checks = examine(deep=deep)
    marks = {True: Text("ok", "green"), False: Text("no", "red"), None: Text("--", "yellow")}
    rows = [(marks[check.ok], check.name, check.value) for check in checks]
    emit(
        {"deep": deep, "checks": [dataclasses.asdict(check) for check in checks]},
        json_target,
        [table("bnexport doctor", ("", "", ""), rows)],
    )
    missing = sum(check.ok is None for check in checks)
    broken = [f"{check.name}: {check.value}" for check in checks if check.ok is False]
    if broken:
        raise MissingDependencyError("; ".join(broken))
    optional = f"; {missing} optional part{'s' * (missing != 1)} missing, marked --" if missing else ""
    say(f"all good: {len(checks) - missing} checks passed{optional}{'' if deep else '; --deep runs an operator, too'}")
