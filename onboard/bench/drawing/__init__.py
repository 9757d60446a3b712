"""The pictures of a measurement."""
