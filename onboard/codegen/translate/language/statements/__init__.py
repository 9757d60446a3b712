"""Statements: assignments, branches, loops."""
