"""Construction of the graph of a training step."""
