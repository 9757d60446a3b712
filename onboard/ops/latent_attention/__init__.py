"""Attention whose keys and values are expanded from one latent vector a token."""
