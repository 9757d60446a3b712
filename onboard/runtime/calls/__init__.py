"""What callers give to a model and get from it: prompts, outputs, texts that grow."""
