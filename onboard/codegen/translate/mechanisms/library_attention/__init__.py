"""Attention that libraries have whole: modules of PyTorch, the function of flash_attn."""
