"""How a transformers model behaves as a whole: what its logits depend on, and where it says
something else.
"""
