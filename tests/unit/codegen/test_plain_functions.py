"""Functions of constructors that are written as they are, since they compute in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.output.printer import print_block
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

SEARCHED = """
BASE = 3.0


def wide(n):
    return [BASE ** (-k) for k in range(n)]


def near(n: int, start=2) -> int:
    '''Return the first divisor.'''
    def fits(m):
        return n % m == 0

    for k in range(start, n):
        if fits(k):
            return k
    return n


def table(n):
    rows = {}
    for k in range(n):
        if k % near(n) == 1:
            continue
        rows[k] = wide(k + 1)[-1]
        if len(rows) > near(5, start=3):
            break
    return [rows.get(k, math.log2(n)) for k in range(n)]


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.register_buffer("rows", torch.tensor(table(config.size)), persistent=False)

    def forward(self, x):
        return x * self.rows.sum()
"""


def _functions(state: Any) -> str:
    """Return the helper functions of what was translated as text."""
    texts = []
    for key, each in state.translator.functions.items():
        lines = print_block(each.body).splitlines()
        texts.append("\n    ".join([f"def {key}({', '.join(each.parameters)}):", *lines]))
    return "\n\n\n".join(texts)


def _same(translate: Translate, text: str, size: int) -> None:
    state, _, _ = translate(text, {"size": 4}, specialised=True)
    ours = _made(f"{_functions(state)}\n\n\n{_written(state)}", {"size": size})
    x = torch.randn(2, 3)
    assert torch.equal(ours(x), _made(text, {"size": size})(x))


@pytest.mark.parametrize("size", [4, 15])
def test_functions_that_return_out_of_loops(translate: Translate, size: int) -> None:
    _same(translate, SEARCHED, size)


METHODS = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.register_buffer("rows", torch.tensor(self.near(config.size)), persistent=False)

    def near(self, n, start=2):
        for k in range(start, n):
            if n % k == 0:
                return [1.0, float(k)]
        return [float(n)]

    def forward(self, x):
        return x * self.rows.sum()
"""


@pytest.mark.parametrize("size", [4, 11])
@pytest.mark.parametrize("static", [False, True])
def test_a_method_that_reads_nothing_of_its_object(
    translate: Translate, size: int, static: bool
) -> None:
    as_static = METHODS.replace("    def near(self, ", "    @staticmethod\n    def near(")
    _same(translate, as_static if static else METHODS, size)


INSIDE = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

        def near(n):
            for k in range(2, n):
                if n % k == 0:
                    return [1.0, float(k)]
            return [float(n)]

        self.register_buffer("rows", torch.tensor(near(config.size)), persistent=False)

    def forward(self, x):
        return x * self.rows.sum()
"""


@pytest.mark.parametrize("size", [4, 11])
def test_a_function_inside_the_constructor(translate: Translate, size: int) -> None:
    _same(translate, INSIDE, size)


RECURSIVE = SEARCHED.replace("k in range(start, n)", "k in [start] if start < n else []").replace(
    "    return n\n", "    return near(n, start + 1) if start < n else n\n"
)


@pytest.mark.parametrize("size", [7, 9])
def test_a_function_that_calls_itself(translate: Translate, size: int) -> None:
    assert "near(n, start + 1)" in RECURSIVE
    _same(translate, RECURSIVE, size)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return k\n", "return k + len(torch.rand(n))\n"),
        ("return k\n", "return LEFT.pop()\n"),
        ("return k\n", "return open('x')\n"),
        ("def fits(m):", "import os\n    def fits(m):"),
    ],
)
def test_what_does_more_than_compute_is_refused(translate: Translate, old: str, new: str) -> None:
    assert old in RECURSIVE
    text = RECURSIVE.replace("BASE = 3.0", "BASE = 3.0\nLEFT = [1, 2] * 99").replace(old, new)
    with pytest.raises(Untranslatable):
        translate(text, {"size": 7}, specialised=True)


def test_what_reads_variables_around_it_is_refused(translate: Translate) -> None:
    text = "k = 2\n\n\n" + INSIDE.replace("def near(n):", "k = config.size\n\n        def near(n):")
    text = text.replace("for k in range(2, n):", "for m in range(k, n):").replace("n % k", "n % m")
    with pytest.raises(Untranslatable, match="near"):
        translate(text, {"size": 4}, specialised=True)
