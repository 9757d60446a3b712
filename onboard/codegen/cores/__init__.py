"""Attention in a recorded forward, found by what it computes, whatever way it is written in."""
