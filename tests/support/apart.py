"""Test files run in a process of their own: Triton decides when it is imported whether kernels are
interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MARKS = ["not exhaustive", pytest.param("exhaustive", marks=pytest.mark.exhaustive)]
"""For a test that runs others: those that are exhaustive run where it is."""


def run_apart(
    folder: Path, *files: str, interpreted: bool = True, marks: str = "", **environment: str
) -> None:
    """Run `files` of `folder` with pytest, on the CPU in Triton's interpreter or as they are, of
    which only the tests that have these marks; all must pass.
    """
    variables = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | environment
    if interpreted:
        variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *files]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
