"""Quantised tensors as files have them, one layout a file."""
