"""Torch modules as data: copies, graphs that lead back to them, outputs as arrays."""
