"""Config, Hugging Face source and module tree -> `ModelSpec`."""
