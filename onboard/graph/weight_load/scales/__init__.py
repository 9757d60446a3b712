"""Scales of a checkpoint that are of no weight: of what a cache holds, and of what a layer is given."""
