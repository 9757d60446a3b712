"""Triton decides when it is imported whether kernels are interpreted, so this runs in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the package triton, which there is for Linux only")


def test_fusions_on_the_triton_back_end() -> None:
    files = ["interpreted_fusions.py", "interpreted_linears.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
