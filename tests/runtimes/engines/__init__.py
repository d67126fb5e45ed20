"""One module for each runtime: `version()`, and `run(path, inputs, outputs, libraries)`, which returns arrays by name.

They run in the runtime's own environment, with NumPy and nothing of ours.
"""
