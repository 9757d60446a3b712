"""Helpers of the transforms of stage `compile`: CUDA graphs, pieces of graphs, streams."""
