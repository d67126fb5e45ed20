"""Run two models on the same inputs and give one verdict."""
