"""What a generated model file may be made of, checked in its text before anything runs it."""
