"""What the ranks of a run on several devices exchange."""
