"""ONNX Runtime: sessions, groups of processes, latency, doctor."""
