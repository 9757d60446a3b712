"""Runs of graphs that have their keys and values as inputs and outputs, one prompt at a time."""
