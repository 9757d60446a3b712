"""The classes and functions that a model reaches, each translated once for all its uses."""
