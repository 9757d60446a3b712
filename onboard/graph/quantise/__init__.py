"""Linear layers that compute with quantised weights: how these get into a graph."""
