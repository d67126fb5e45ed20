"""A refusal is a result: a code that tests and tools compare, and a sentence for people."""

from __future__ import annotations


class Refused(Exception):
    """Raised inside a rule's check. The engine turns it into data; it never leaves this package."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
