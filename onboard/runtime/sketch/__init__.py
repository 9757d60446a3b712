"""A model's sizes without torch: its code runs on tensors that have shapes and no values."""
