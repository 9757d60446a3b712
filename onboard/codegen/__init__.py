"""`ModelSpec` -> files, through the templates."""
