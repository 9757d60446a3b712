from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    """Fresh random inputs in every run; pytest shows the printed seed when a test fails."""
    seed = random.SystemRandom().randrange(2**31)
    torch.manual_seed(seed)
    print(f"seed {seed}")
