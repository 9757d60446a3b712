from __future__ import annotations

import pytest

from onboard.codegen.format import format_python


def test_unused_imports_go_and_the_rest_is_sorted() -> None:
    text = "import torch\nimport math\nimport os\nfrom torch import nn\nx = (math.pi,torch.ones( 2 ),nn)\n"
    assert format_python(text) == (
        "import math\n\nimport torch\nfrom torch import nn\n\nx = (math.pi, torch.ones(2), nn)\n"
    )


def test_formatting_is_stable() -> None:
    text = format_python("def f( a,b ):\n  return a+b\n")
    assert format_python(text) == text


def test_what_is_not_python_is_a_fault_of_the_generator() -> None:
    with pytest.raises(AssertionError, match="ruff"):
        format_python("def f(:\n")
