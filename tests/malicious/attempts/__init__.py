"""Attempts on a tool that opens model files, numbered, each with its verdict: ATTEMPTS lists all of them."""

from tests.malicious.attempts import external_data, raw_bytes, tensors_and_graphs  # noqa: F401 - they fill ATTEMPTS
from tests.malicious.attempts.base import ATTEMPTS, HANDLED, SECRET, WEIGHT, Attempt, data, example, external, write

__all__ = ["ATTEMPTS", "HANDLED", "SECRET", "WEIGHT", "Attempt", "data", "example", "external", "write"]
