"""Kernels, compiled for the GPU at their first use, and the pure functions that say how to launch them."""
