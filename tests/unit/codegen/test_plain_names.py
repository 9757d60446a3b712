"""Helper functions are named after what is left of them, and numbers of a config need no numpy."""

from __future__ import annotations

import pytest

from onboard.codegen.plain_names import with_plain_names

DROPOUT = """
def bias_dropout_add(x, residual):
    return residual + x


def forward(x):
    return bias_dropout_add(x, x.bias_dropout_add(x))
"""
NUMPY = """
import numpy as np


def scaled(x, size):
    return x * np.sqrt(size)
"""


def test_a_function_that_drops_nothing_out_does_not_say_so() -> None:
    text = with_plain_names(DROPOUT)
    assert "def bias_add(x, residual)" in text
    assert "return bias_add(x, x.bias_dropout_add(x))" in text


def test_a_name_that_is_taken_stays() -> None:
    text = DROPOUT.replace("x, residual", "x, residual, bias_add=None").replace(
        "residual + x", "residual + x + bias_add"
    )
    assert with_plain_names(text) == text


def test_math_has_what_numpy_was_for() -> None:
    text = with_plain_names(NUMPY)
    assert "import math" in text
    assert "numpy" not in text
    scope: dict[str, object] = {}
    exec(text, scope)
    assert scope["scaled"](2.0, 9) == 6.0  # type: ignore[operator]


@pytest.mark.parametrize("call", ["np.arange(size)", "np.nextafter(size, 1) + np.asarray(size)"])
def test_what_math_has_not_stays(call: str) -> None:
    text = NUMPY.replace("np.sqrt(size)", call)
    assert with_plain_names(text) == text
