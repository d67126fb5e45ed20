"""Values of a model that are compared beside its outputs."""
