"""Syntax trees alone, whatever their code means."""
