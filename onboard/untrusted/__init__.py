"""What comes from elsewhere: how much of it is read, parsed, built and run."""
