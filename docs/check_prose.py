"""Words of the documents: proselint, without the checks that code and tables set off.

    python -m docs.check_prose [PAGE ...]

Prints what it found and exits with 1 if there is anything. proselint 0.16 ignores the checks that a configuration turns
off where it reads several files, so they are left out here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OFF = tuple(json.loads((ROOT / "docs/proselint.json").read_text())["checks"])
FINDING = re.compile(r"^(?P<place>.+?:\d+:\d+): (?P<check>[\w.]+): ", re.MULTILINE)


def findings(pages: list[Path]) -> list[str]:
    """Returns one line for each finding that counts."""
    program = Path(sys.executable).with_name("proselint")
    command = [str(program), "--config", str(ROOT / "docs/proselint.json"), "check", *map(str, pages)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or (done.returncode == 1 and not FINDING.search(done.stdout + done.stderr)):
        raise SystemExit(done.stdout + done.stderr)
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if (found := FINDING.match(line)) and not found["check"].startswith(OFF)]


def main() -> int:
    pages = [Path(name) for name in sys.argv[1:]]
    pages = pages or [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    found = findings(pages)
    print("\n".join(found) or f"{len(pages)} pages: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
