"""Texts with tokens that code treats by themselves."""
