"""What is seen in a repository's files without running them, and what a causal mask is."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from onboard.analysis.recognise.mask_makers import is_causal_mask
from onboard.analysis.repository import _classes, make_package, stand_in_for_neighbours
from onboard.analysis.repository_source import PACKAGE, survey_code
from onboard.cli.terminal import one_line
from onboard.errors import OnboardError

AUTO_MAP = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M"}


def _write(folder: Path, modeling: str) -> None:
    (folder / "configuration_x.py").write_text("from transformers import PretrainedConfig\n")
    (folder / "modeling_x.py").write_text(modeling)


def test_a_survey_follows_imports_and_shows_what_reaches_beyond_tensors(tmp_path: Path) -> None:
    _write(tmp_path, "import torch\nfrom .helpers import f\nimport subprocess\nprint(open('x'))\n")
    (tmp_path / "helpers.py").write_text("import numpy as np\nos = __import__('os')\n")
    survey = survey_code(tmp_path, {"auto_map": AUTO_MAP})
    assert sorted(survey.files) == ["configuration_x.py", "helpers.py", "modeling_x.py"]
    assert survey.imports == ["numpy", "subprocess", "torch", "transformers"]
    assert survey.remarkable == [
        "modeling_x.py:3: import subprocess",
        "modeling_x.py:4: open(...)",
        "modeling_x.py:4: runs at import",
        "helpers.py:2: __import__(...)",
    ]


def test_what_runs_at_import_is_shown_first_and_all_is_counted(tmp_path: Path) -> None:
    harmless = "import os\nimport socket\nimport glob\nopen('x') if None else open('y')\n"
    _write(tmp_path, f"{harmless * 3}_X = os.popen('id')\nprint(1)\n")
    shown = str(survey_code(tmp_path, {"auto_map": AUTO_MAP}))
    assert "it has 5 x runs at import, 6 x open(...), 3 x import os, 3 x import socket" in shown
    looked = shown.partition("look at ")[2]
    assert "modeling_x.py:13: runs at import; modeling_x.py:14: runs at import" in looked


def test_nothing_that_is_long_buries_what_matters(tmp_path: Path) -> None:
    names = [f"{'a' * 150}{index}" for index in range(50)]
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"import {'z' * 3000}{name}\n")
    others = [f"import {'b' * 500}{index}" for index in range(300)]
    files = [f"from .{name} import x" for name in names]
    _write(
        tmp_path,
        "\n".join([*others, *files, *(f"import sys.{name}" for name in names), "import os"]),
    )
    shown = one_line(f"this would be run: {survey_code(tmp_path, {'auto_map': AUTO_MAP})}")
    assert "50 x import sys, 1 x import os" in shown
    assert "a" * 30 in shown


@pytest.mark.parametrize(
    ("auto_map", "modeling", "message"),
    [
        ({**AUTO_MAP, "AutoConfig": "a/b--configuration_y.C"}, "", "another repository"),
        ({**AUTO_MAP, "AutoConfig": "a/b--../x.C"}, "", "another repository"),
        ({"AutoConfig": "configuration_x.C"}, "", "names no AutoModelForCausalLM"),
        ({**AUTO_MAP, "AutoConfig": "../x.C"}, "", "no module and class"),
        (AUTO_MAP, "def", "is not Python"),
        (AUTO_MAP, "from .gone import x", "lacks gone.py"),
    ],
)
def test_code_that_is_not_whole_is_refused(
    tmp_path: Path, auto_map: object, modeling: str, message: str
) -> None:
    _write(tmp_path, modeling)
    with pytest.raises(OnboardError, match=message):
        survey_code(tmp_path, {"auto_map": auto_map})


def test_the_copy_here_of_another_repository_s_code_is_read(tmp_path: Path) -> None:
    """As models have it that were finetuned from one with code."""
    _write(tmp_path, "")
    named = {key: f"someone/their-model--{name}" for key, name in AUTO_MAP.items()}
    assert survey_code(tmp_path, {"auto_map": named}).classes == AUTO_MAP


def test_the_config_class_may_be_that_of_transformers(tmp_path: Path) -> None:
    _write(tmp_path, "")
    auto_map = {"AutoModelForCausalLM": AUTO_MAP["AutoModelForCausalLM"]}
    for model_type in ("llama", "llama_own_code"):
        survey = survey_code(tmp_path, {"model_type": model_type, "auto_map": auto_map})
        assert survey.classes == auto_map
    with pytest.raises(OnboardError, match="names no AutoConfig"):
        survey_code(tmp_path, {"model_type": "unheard", "auto_map": auto_map})


def test_code_in_another_encoding_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "")
    (tmp_path / "modeling_x.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    with pytest.raises(OnboardError, match="is not Python in UTF-8"):
        survey_code(tmp_path, {"auto_map": AUTO_MAP})


def test_a_causal_mask_is_exactly_that() -> None:
    mask = torch.full((5, 5), torch.finfo(torch.float32).min).triu(1)[None, None]
    assert is_causal_mask(mask)
    assert is_causal_mask(mask.expand(3, 1, 5, 5))
    assert is_causal_mask(mask[:, :, :4])  # a key behind the text's
    window = mask + torch.full((5, 5), -1e9).tril(-3)
    shifted = torch.full((5, 5), -1e9).triu(2)[None, None]
    for other in (
        window,
        shifted,
        mask[0],
        mask[..., :4],
        mask[..., 1:, :],
        mask * 0,
        mask.expand(1, 2, 5, 5),
        None,
        mask[..., :1, :1],
    ):
        assert not is_causal_mask(other)


_ABSENT = """
try:
    from .kernels import fast
except ImportError:
    fast = None


def quantised(module):
    if isinstance(module, int):
        from .quantization import Linear8
        return Linear8(module)
    from .deeper.quantization import Linear4
    return isinstance(module, Linear4)


class Loader:
    def load(self):
        try:
            from .kernels import slow
        except ImportError:
            return "none"
        return slow
"""


def test_files_that_only_functions_import_may_be_absent(tmp_path: Path) -> None:
    _write(tmp_path, _ABSENT)
    survey = survey_code(tmp_path, {"auto_map": AUTO_MAP})
    assert survey.absent == {
        "quantization.py": "modeling_x.py:10",
        "deeper/quantization.py": "modeling_x.py:12",
    }
    make_package(tmp_path)
    stand_in_for_neighbours(tmp_path, survey.absent)
    loaded = importlib.import_module(f"{PACKAGE}.modeling_x")
    assert (loaded.fast, loaded.Loader().load()) == (None, "none")
    assert loaded.quantised("a module") is False
    with pytest.raises(OnboardError, match=r"uses quantization\.Linear8, which is not here"):
        loaded.quantised(8)


@pytest.mark.parametrize(
    "around", ["{}", "class Part:\n    {}", "if 1:\n    {}\nelse:\n    pass", "with a:\n    {}"]
)
def test_what_loading_a_file_needs_is_refused_by_name(tmp_path: Path, around: str) -> None:
    lines = around.format("from .absent import x")
    _write(tmp_path, f"import contextlib\na = contextlib.nullcontext()\n{lines}\n")
    with pytest.raises(OnboardError, match=r"the model's code lacks absent\.py"):
        _classes(tmp_path, survey_code(tmp_path, {"auto_map": AUTO_MAP}), "lacking", [])
