"""Tensors that code sees in another order than they lie in."""
