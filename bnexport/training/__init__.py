"""A whole training step as one ONNX graph, and the session that runs it.

problem       the model made ready: batch norms, names of its state, forward and loss
optimizers    SGD, Adam and AdamW as pure functions
dropout       seeded masks that every runtime draws alike
step          forward, loss, gradients, clipping, accumulation and update as one function of tensors
tracing       from that function to an ONNX graph
graph         names, types and what tracing leaves behind
translations  operators that the exporter lacks
description   what a graph says about itself, for the session
api           export_training_step
files         the three files of a step
verification  the exported step against torch
session       TrainingSession: NumPy and ONNX Runtime, no torch
"""
