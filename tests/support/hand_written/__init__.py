"""Models as a person who knows the papers writes them, with the canonical ops: how long generated
files may be.
"""
