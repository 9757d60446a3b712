"""What a request wants of its next token beyond what the model says."""
