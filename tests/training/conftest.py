"""What several tests of training ask for."""

import pytest

from bnexport.training import verification


@pytest.fixture
def checked(monkeypatch):
    """The arguments with which exports of the test call verification.check."""
    calls, check = [], verification.check
    monkeypatch.setattr(verification, "check", lambda *arguments: calls.append(arguments) or check(*arguments))
    return calls
