"""Objects that modules and functions give to one another."""
