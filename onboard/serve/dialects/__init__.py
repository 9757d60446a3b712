"""The interfaces that clients speak, one module each, over the same answers."""
