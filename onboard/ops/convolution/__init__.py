"""Short causal convolutions along the sequence."""
