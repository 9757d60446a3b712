"""Helpers of stage `weight_load`: from a checkpoint's tensors to a graph's parameters."""
