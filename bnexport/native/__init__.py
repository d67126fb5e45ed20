"""Access to the compiled libraries and their C functions."""
