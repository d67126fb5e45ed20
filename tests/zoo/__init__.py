"""Real architectures, built without weights and exported in every way, next to plain torch.onnx.export."""
