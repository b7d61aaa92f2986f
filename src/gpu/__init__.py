"""Tensors: slot arenas, running state, the model runner, sampling, digests. Knows no actor."""
