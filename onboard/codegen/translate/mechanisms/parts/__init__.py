"""Parts of a whole model."""
