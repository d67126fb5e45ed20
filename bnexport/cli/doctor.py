"""The command that says what works here."""

from __future__ import annotations

import dataclasses

from rich.text import Text

from bnexport.cli.common import Json, app
from bnexport.cli.output import check_targets, emit, table
from bnexport.errors import MissingDependencyError


@app.command()
def doctor(json_target: Json = None) -> None:
    """Says what works here, and what does not and why."""
    from bnexport.runtime.doctor import examine

    check_targets(json=json_target)
    checks = examine()
    marks = {True: Text("ok", "green"), False: Text("no", "red"), None: Text("--", "yellow")}
    rows = [(marks[check.ok], check.name, check.value) for check in checks]
    emit(
        {"checks": [dataclasses.asdict(check) for check in checks]},
        json_target,
        [table("bnexport doctor", ("", "", ""), rows)],
    )
    broken = [f"{check.name}: {check.value}" for check in checks if check.ok is False]
    if broken:
        raise MissingDependencyError("; ".join(broken))
