"""Run the graph of a training step."""
