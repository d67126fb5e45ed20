"""Refusals: a code for tests and tools, and a sentence for people."""

from __future__ import annotations

from bnexport.model_io.validate import printable


class Refused(Exception):
    """Raised when a rule or a reader does not apply. The folder records it; it never leaves the package."""

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        self.text = printable(text)
        super().__init__(self.text)
