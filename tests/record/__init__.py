"""What the package does and says today, for a comparison after it has been rebuilt: `python -m tests.record`."""
