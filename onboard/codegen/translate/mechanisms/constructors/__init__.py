"""What constructors do besides making modules."""
