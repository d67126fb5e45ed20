"""Build the graph of a training step."""
