"""Weights of four or eight bits over few tokens on Hopper GPUs, in CUDA C++."""
