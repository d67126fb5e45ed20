"""Execution of the graph of a training step."""
