"""How phases start other programs, and watch them."""
