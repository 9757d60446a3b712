"""Tiny models whose caches are inputs and outputs of their graphs."""
