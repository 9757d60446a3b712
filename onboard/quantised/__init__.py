"""Quantised checkpoints: what their configs and tensors say, and the weights that they stand for."""
