"""Read batch norms and per-channel maps out of a graph."""
