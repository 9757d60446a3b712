"""State space models: Mamba's scan and Mamba 2's."""
