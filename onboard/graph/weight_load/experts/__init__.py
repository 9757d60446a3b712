"""The weights of mixtures of experts: in stacks, and as codes."""
