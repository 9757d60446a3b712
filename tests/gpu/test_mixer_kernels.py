"""The tests of the kernels of mixers, mixtures, fusions and invariant rows, interpreted on the CPU,
on a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.apart import run_apart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIT = Path(__file__).resolve().parents[1] / "unit" / "ops"


def test_kernels_are_right_on_the_device() -> None:
    names = ("mixers", "recurrences", "moe", "fused", "invariant", "lora")
    files = [f"interpreted_{name}.py" for name in names]
    run_apart(UNIT, *files, interpreted=False)
