"""Export of a training step as one ONNX graph, and its execution.

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
activations   what a step keeps between forward and backward
session       TrainingSession: NumPy and ONNX Runtime, no torch
state         the session's tensors, in two sets of memory
single_process, parallel, parallel_graph
              the steps of one process, and of a group: gradients, their sum, the update
examples      losses by name, and example targets
"""
