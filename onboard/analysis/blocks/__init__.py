"""What a spec says of blocks: what all have, and mixtures of experts."""
