"""Linear attention with correction: the delta rule, gated or not, Kimi Delta Attention, and that of
RWKV-7."""
