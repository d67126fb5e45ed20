"""Read and edit onnx-ir graphs."""
