"""What stands between a repository's code and the machine, each made of one means of the system."""
