"""Recognition of batch norms and per-channel maps in a graph."""
