"""Modules of PyTorch that are made of attention."""
