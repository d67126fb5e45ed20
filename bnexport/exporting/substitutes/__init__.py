"""What a model under export gets in place of its own `int`, operators and parameters, which exporters do not take."""
