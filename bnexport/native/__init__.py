"""The compiled libraries: finding them and calling their C functions."""
