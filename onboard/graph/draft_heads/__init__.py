"""Heads in a checkpoint that predict further tokens, which transformers' models leave out: found by
their tensors, built of the model's own layers, and put beside the model's graph, over its caches.
"""
