"""Modules of transformers' models as they were, for code that calls them so."""
