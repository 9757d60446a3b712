"""What a model writes, taken apart: text, reasoning and calls of tools."""
