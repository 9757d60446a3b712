"""What stands in for flash-linear-attention (`fla`)."""
