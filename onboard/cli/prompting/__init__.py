"""What `onboard run` is asked: images beside prompts, and a conversation with a person."""
