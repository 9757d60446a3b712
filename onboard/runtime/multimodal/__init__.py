"""Prompts with images and sound: transformers' towers, and what they add to a step."""
