"""Intermediate values that are compared in addition to the outputs."""
