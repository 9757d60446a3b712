"""Low-rank adapters of linear layers."""
