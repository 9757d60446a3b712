"""The tests of generated kernels, which the CPU runs interpreted, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("xdsl", reason="needs the extra mlir")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

UNIT = Path(__file__).resolve().parents[1] / "unit" / "graph"


def test_kernels_are_right_on_the_device() -> None:
    """In a process of its own, whose imports find the tests' support files."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "interpreted_pointwise.py"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=UNIT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
