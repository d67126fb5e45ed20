"""The public surface is what tests/public_api.txt says, and all of it is documented."""

from __future__ import annotations

import difflib
import inspect

from tests import public_api


def test_the_surface_is_the_reviewed_one() -> None:
    reviewed, now = public_api.FILE.read_text(), public_api.listing()
    difference = "".join(difflib.unified_diff(reviewed.splitlines(True), now.splitlines(True), "reviewed", "now", n=0))
    assert reviewed == now, (
        f"the public surface changed; if it was meant, run `python -m tests.public_api`\n{difference}"
    )


def test_every_public_name_has_a_docstring() -> None:
    inner = [
        (f"{name}.{member}", it)
        for name, value in public_api.objects()
        if inspect.isclass(value)
        for member, it, _ in public_api.members(value)
        if it is not None
    ]
    given = [(name, value) for name, value in public_api.objects() if callable(value)]
    assert [name for name, value in [*given, *inner] if not (inspect.getdoc(value) or "").strip()] == []


def test_a_changed_signature_is_seen() -> None:
    def before(x: int, *, y: str = "a") -> None: ...
    def after(x: int, *, y: str = "b") -> None: ...

    assert public_api.signature(before) == "(x: int, *, y: str = 'a') -> None"
    assert public_api.signature(after) != public_api.signature(before)
