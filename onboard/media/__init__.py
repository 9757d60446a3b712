"""Images and sound that prompts have: read from where they lie, within limits, and decoded."""
