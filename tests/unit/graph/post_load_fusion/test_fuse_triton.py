"""Fusions on the triton back end, in a process whose kernels are interpreted."""

from pathlib import Path

import pytest

from tests.support.apart import MARKS, run_apart

pytest.importorskip("triton", reason="needs the package triton, which there is for Linux only")


@pytest.mark.parametrize("marks", MARKS)
def test_fusions_on_the_triton_back_end(marks: str) -> None:
    run_apart(
        Path(__file__).parent,
        "interpreted_adding.py",
        "interpreted_fusions.py",
        "interpreted_linears.py",
        marks=marks,
    )
