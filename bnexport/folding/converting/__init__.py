"""Turn sync batch norm and training nodes into inference BatchNormalization."""
