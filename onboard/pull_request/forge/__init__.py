"""GitHub: access to it, its calls, what was said there and what is posted."""
