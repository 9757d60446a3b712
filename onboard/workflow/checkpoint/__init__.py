"""What the phases ask of a checkpoint: its size, weights, vocabulary and family."""
