"""Expressions: operators, names and attributes, items, calls, comprehensions."""
