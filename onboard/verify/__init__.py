"""Proof in all its forms: blocks, graphs, runs and texts against transformers."""
