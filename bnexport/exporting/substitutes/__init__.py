"""Replacements, during export, for a model's `int`, operators and parameters that exporters do not accept."""
