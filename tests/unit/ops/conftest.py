from __future__ import annotations

import os
import random

import pytest
import torch

if (device := os.environ.get("ONBOARD_TEST_DEVICE")) is not None:  # by `tests/gpu`
    torch.set_default_device(device)


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    """Fresh random inputs in every run; pytest shows the printed seed when a test fails."""
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    print(f"seed {seed}")
