"""Attention in the forms that modeling code has it in, with masks, windows and biases."""
