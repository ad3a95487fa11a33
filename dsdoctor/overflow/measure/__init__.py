"""Tensors -> rows of extremes and counts, by C, by a Triton kernel, or by torch."""
