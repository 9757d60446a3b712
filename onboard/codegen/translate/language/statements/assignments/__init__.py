"""Assignments: where values go."""
