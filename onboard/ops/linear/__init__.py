"""Linear layers, feed-forward blocks and their activations."""
