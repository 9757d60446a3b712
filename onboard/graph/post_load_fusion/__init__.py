"""Helpers of stage `post_load_fusion`: what is computed together, or once."""
