"""Linear attention with correction: the delta rule, gated or not, and Kimi Delta Attention."""
