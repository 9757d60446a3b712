"""Code from a model's repository: run with consent only, in a child process with little to harm."""
