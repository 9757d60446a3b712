"""Scans along the sequence, as modules, as loops and as stretches of statements."""
