"""Loops: what their turns do and leave."""
