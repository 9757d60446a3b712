"""Bounds that code has on values: seen as it runs, and shown by values of every size."""
