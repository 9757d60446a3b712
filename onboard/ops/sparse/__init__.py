"""Attention to chosen keys, what chooses them, and entries that stand for blocks of tokens."""
