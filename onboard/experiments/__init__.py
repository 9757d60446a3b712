"""Fusions that no measurement has shown to be faster: off by default, used by their transforms
alone.

Nothing else of the package may import this, so that it can be taken away.
"""
