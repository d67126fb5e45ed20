"""A refusal is a result: a code that tests and tools compare, and a sentence for people."""

from __future__ import annotations

from bnexport.model_io.validate import printable


class Refused(Exception):
    """Raised inside a rule's check. The engine turns it into data; it never leaves this package."""

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        self.text = printable(text)
        super().__init__(self.text)
