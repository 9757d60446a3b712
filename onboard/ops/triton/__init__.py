"""Triton back end."""
