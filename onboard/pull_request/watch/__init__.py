"""What is done for a pull request while it is open: reading, answering, changing."""
