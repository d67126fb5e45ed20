"""ONNX Runtime: sessions, groups of processes, latency, installation check."""
