"""Finding, loading and using the compiled library. Nothing here imports torch or onnxruntime early."""
