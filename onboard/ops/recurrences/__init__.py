"""Recurrences of one file each, and what cached forms of all recurrences share."""
