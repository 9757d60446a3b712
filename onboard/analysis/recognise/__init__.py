"""Recognise what a model's modules and functions compute, by comparing them with canonical ops."""

REFUSED: tuple[type[Exception], ...] = (Exception,)
"""What code may raise when a probe runs it with inputs of its own: it is not what the probe looks
for. Whatever a model's own code raises counts, its assertions too.
"""
