"""What tests find, line by line in a file beside them; `RECORD=1 python -m pytest -n 0 PATH` writes it anew, to be read as a diff."""

from __future__ import annotations

import atexit
import os
from pathlib import Path


class Recorded:
    """A file of lines `name: text`."""

    def __init__(self, path: Path) -> None:
        self._path, self._found = path, dict[str, str]()
        self._known = dict(line.split(": ", 1) for line in path.read_text().splitlines()) if path.exists() else {}
        if "RECORD" in os.environ:
            atexit.register(self._write)

    def check(self, name: str, text: str) -> None:
        """Compare a text of one line with what is recorded under the name."""
        self._found[name] = text = text.rstrip()
        assert "RECORD" in os.environ or text == self._known.get(name), f"{name}: not as recorded in {self._path.name}"

    def _write(self) -> None:
        if self._found:
            self._path.write_text("".join(f"{name}: {text}\n" for name, text in self._found.items()))
