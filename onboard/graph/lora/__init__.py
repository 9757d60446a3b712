"""Low-rank adapters of a served model: their files, and their places in its graph."""
