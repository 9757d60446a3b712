"""A model that several ranks run: the first one's engine, and those that follow it."""
