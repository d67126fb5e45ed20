"""A refusal is a result: a code that tests and tools compare, and a sentence for people."""

from __future__ import annotations

from bnexport.model_io.validate import printable

# Texts up to this length are shown whole.
_LONG = 600


class Refused(Exception):
    """Raised inside a rule's check. The engine turns it into data; it never leaves this package."""

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        self.text = text if text.isprintable() and len(text) < _LONG else printable(text)
        super().__init__(self.text)
