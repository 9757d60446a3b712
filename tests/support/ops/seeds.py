"""A fresh seed for a test, which its output names."""

from __future__ import annotations

import random

import torch


def seeded() -> None:
    """Seed torch with a number that is printed."""
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
