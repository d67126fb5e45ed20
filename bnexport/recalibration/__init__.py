"""Re-estimation of running statistics on data, of torch modules (`modules`) and of ONNX files (`files`).

Layers finish one by one, each on inputs that the finished layers before it have normalised with their new statistics, or
together, in one pass in which each layer normalises with the statistics of the batch.
"""
