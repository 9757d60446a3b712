"""The tests of generated kernels, which the CPU runs interpreted, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.apart import run_apart

pytest.importorskip("xdsl", reason="needs the extra mlir")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

UNIT = Path(__file__).resolve().parents[1] / "unit" / "graph"


def test_kernels_are_right_on_the_device() -> None:
    """In a process of its own, whose imports find the tests' support files."""
    run_apart(UNIT, "interpreted_pointwise.py", interpreted=False)
