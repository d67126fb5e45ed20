"""Proof of folds in torch modules: the module as a graph of ONNX operators, and what a fold says of it."""
