"""Masks that code makes step by step."""
