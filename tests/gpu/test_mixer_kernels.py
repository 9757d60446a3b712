"""The tests of the kernels of mixers, mixtures and invariant rows, which the CPU runs interpreted, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

UNIT = Path(__file__).resolve().parents[1] / "unit" / "ops"


def test_kernels_are_right_on_the_device() -> None:
    """In a process of its own, whose imports find the tests' support files."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "interpreted_mixers.py",
        "interpreted_moe.py",
        "interpreted_invariant.py",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=UNIT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
