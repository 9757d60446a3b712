"""A model's pull request on GitHub, from its opening to its end."""
