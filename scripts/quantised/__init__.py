"""Writes the quantised checkpoints of tests/support/quantised with the formats' own libraries."""
