"""The command that says what works here."""

from __future__ import annotations

import dataclasses

from rich.table import Table

from bnexport.cli.common import Json, app, emit, escape
from bnexport.errors import MissingDependencyError


@app.command()
def doctor(json_target: Json = None) -> None:
    """Versions, the custom-op library, execution providers: what works here, and what does not and why."""
    from bnexport.runtime.doctor import examine

    checks = examine()
    table = Table(title="bnexport doctor", show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    marks = {True: "[green]ok[/green]", False: "[red]no[/red]", None: "[yellow]--[/yellow]"}
    for check in checks:
        table.add_row(marks[check.ok], check.name, escape(check.value))
    emit({"schema_version": 1, "checks": [dataclasses.asdict(check) for check in checks]}, json_target, [table])
    broken = [f"{check.name}: {check.value}" for check in checks if check.ok is False]
    if broken:
        raise MissingDependencyError("; ".join(broken))
