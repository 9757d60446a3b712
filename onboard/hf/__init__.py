"""What is known of transformers: its classes, configs and conventions."""
