"""Kernels in CUDA C++, for what Triton cannot say: compiled when they are first needed, by the library
that PyTorch brings.
"""
