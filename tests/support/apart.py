"""Test files run in processes of their own: Triton decides when it is imported whether kernels are
interpreted. Those that are come from one in which it has decided so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from tests.support.warm import shared

MARKS = ["not exhaustive", pytest.param("exhaustive", marks=pytest.mark.exhaustive)]
"""For a test that runs others: those that are exhaustive run where it is."""
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
"""The environment in which kernels are interpreted, on the CPU."""


def run_apart(
    folder: Path, *files: str, interpreted: bool = True, marks: str = "", **environment: str
) -> None:
    """Run `files` of `folder` with pytest, on the CPU in Triton's interpreter or as they are, of
    which only the tests that have these marks; all must pass.
    """
    words = ["pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *files]
    with tempfile.TemporaryFile("w+") as output:
        if interpreted:
            added = environment | INTERPRETED
            code = shared(**INTERPRETED).run_module(words, output, folder=folder, environment=added)
        else:
            code = _as_they_are(words, output, folder, environment)
        output.seek(0)
        print(output.read())
    assert code == 0


def _as_they_are(
    words: Sequence[str], output: IO[str], folder: Path, environment: Mapping[str, str]
) -> int:
    """In a new interpreter, for it may ask for GPUs."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=variables | environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        check=False,
    ).returncode
