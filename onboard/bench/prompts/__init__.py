"""Times of given prompts, here and in transformers."""
