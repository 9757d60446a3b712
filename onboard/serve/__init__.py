"""`onboard serve`: a model behind the HTTP interfaces that clients of 2026 speak."""
