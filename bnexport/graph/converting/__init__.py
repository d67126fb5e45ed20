"""Conversion of sync batch norm and training nodes to inference BatchNormalization."""
