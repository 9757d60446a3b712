"""Speculative decoding: drafts of the next tokens, all checked by one step of the model."""
