"""Hostile inputs of every kind that comes from elsewhere, drawn by hypothesis from a corpus.

`python -m tests.fuzz --count 10000` draws as many and prints what came of each kind;
tests/fuzz/test_fuzz.py draws a few in `make test`.
"""
