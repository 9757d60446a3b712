"""run: build the model from its standalone config and generate, with reduced layers first, then with all."""

from __future__ import annotations

ARTIFACT = "run.json"
