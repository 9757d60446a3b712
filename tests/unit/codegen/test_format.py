from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from onboard.codegen.format import format_python
from onboard.render import python_literal

TEXT = """\
import onboard.ops  # noqa: F401
import torch
from transformers import LlamaConfig
from torch import nn
from onboard.modeling import CausalLMOutput
import os


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> CausalLMOutput:
        super().__init__()

        self.size = torch.tensor(config.hidden_size)

        self.other = 'x'
"""
EXPECTED = """\
import torch
from torch import nn
from transformers import LlamaConfig

import onboard.ops  # noqa: F401
from onboard.modeling import CausalLMOutput


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> CausalLMOutput:
        super().__init__()
        self.size = torch.tensor(config.hidden_size)

        self.other = "x"
"""


def test_imports_are_sorted_and_used_with_the_project_last_and_no_gap_opens_a_constructor() -> None:
    assert format_python(TEXT) == EXPECTED


def test_a_formatted_text_stays() -> None:
    assert format_python(EXPECTED) == EXPECTED


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, [0.0, math.inf], {"limit": [0.0, -math.inf]}, ("a", 1), "x'\n"]
)
def test_a_value_is_the_same_when_its_code_is_run(value: object) -> None:
    assert eval(python_literal(value), {"float": float}) == value


def test_the_folder_it_runs_in_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is named like a package is not taken for it, so that imports do not change
    places.
    """
    imports = "import pytest\nimport torch\nfrom torch import nn\n\nfrom onboard import LLM\n"
    text = f"{imports}\nx = (pytest, torch, nn, LLM)\n"
    for name in ("pytest", "torch", "onboard", "src/torch"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert format_python(text) == text


LONG = "Attention to a window of tokens and to compressed blocks before it, with sinks and a table"


def test_a_docstring_of_more_columns_has_several_lines() -> None:
    text = 'def f() -> None:\n    """{}"""\n    x = "{}"\n    return x\n'
    words, code = f"{LONG} of rotary-embeddings.", "b" * 120
    found = format_python(text.format(words, code))
    lines = found.splitlines()
    assert max(map(len, lines[1:4])) <= 100
    assert lines[3] == '    """'
    assert (
        " ".join(ast.literal_eval(found.split("    ", 1)[1].split("\n    x")[0]).split()) == words
    )
    assert lines[4] == f'    x = "{code}"'
    assert format_python(found) == found


def test_a_docstring_that_fits_stays_in_its_line() -> None:
    text = f'def f() -> None:\n    """{LONG[:89]}"""\n'
    assert max(map(len, text.splitlines())) == 99
    assert format_python(text) == text
