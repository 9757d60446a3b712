"""Linear layers with integers of eight bits."""
