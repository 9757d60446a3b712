"""What a model comes from besides a folder of safetensors: GGUF files, and what the Hub says when it fails."""
