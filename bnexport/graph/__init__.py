"""Reading and editing onnx-ir graphs."""
