"""Scans along the sequence that methods write as loops or in chunks."""
