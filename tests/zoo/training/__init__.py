"""Training steps of the zoo's architectures, in ONNX Runtime against torch."""
