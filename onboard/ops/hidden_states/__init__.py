"""What is done with whole rows of hidden states: choosing them, keeping them."""
