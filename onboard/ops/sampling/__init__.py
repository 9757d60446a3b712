"""The choice of the next token."""
