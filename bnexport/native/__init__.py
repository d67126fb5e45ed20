"""Find the compiled libraries and call their C functions."""
