"""What a sweep goes over: targets, tiny checkpoints of two kinds, prompts."""
