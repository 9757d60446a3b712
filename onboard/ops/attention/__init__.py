"""Softmax attention: the reference, over pages of a cache, with biases of its own."""
