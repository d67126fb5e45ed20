"""What several files of attempts start from."""

from pathlib import Path

import pytest

from tests.malicious.attempts import SECRET, data, external


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A model in a folder of its own, with external data, beside a file that it must not reach."""
    (tmp_path / "secret").write_bytes(SECRET)
    folder = tmp_path / "victim"
    folder.mkdir()
    data(folder)
    return external(folder)
