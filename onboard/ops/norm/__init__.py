"""Norms, alone and with what stands around them."""
