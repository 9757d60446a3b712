"""A registered model's run in a process of its own: it generates, compares, and reports as JSON."""

MODULE = f"{__name__}.run_model"
"""What `python -m` starts."""
