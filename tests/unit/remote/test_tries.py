"""Code is tried again with what stands in for a package, as long as that changes anything; what is
said in the end.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd, with_rotary

KINDS = """
from transformers.utils import is_flash_attn_2_available
if is_flash_attn_2_available():
    from flash_attn import flash_attn_func
KINDS = {"eager": 0, "flash_attention_2": 1}
"""


def test_code_that_fails_as_before_is_not_tried_without_end(tmp_path: Path) -> None:
    folder = with_rotary(
        save_odd(tmp_path / "kinds", head=KINDS), "KINDS[config._attn_implementation]"
    )
    file = folder / "modeling_odd.py"
    prefix = '    base_model_prefix = "model"\n'
    file.write_text(file.read_text().replace(prefix, f"{prefix}    _supports_sdpa = True\n"))
    error = run_apart(GENERATE, [folder])["kinds"]["error"]
    assert "fails (KeyError: 'sdpa', at modeling_odd.py" in error
    assert '"attn_implementation": "eager"' in error


def test_a_package_whose_version_code_asks_for_is_said_to_be_missing(tmp_path: Path) -> None:
    head = 'import importlib.metadata\nVERSION = importlib.metadata.version("unheard_kernels")\n'
    error = run_apart(GENERATE, [save_odd(tmp_path / "asking", head=head)])["asking"]["error"]
    assert "PackageNotFoundError" in error
    assert "pip install unheard-kernels" in error
    assert "of its time" not in error


def test_a_model_with_a_base_of_its_own_is_refused_as_that(tmp_path: Path) -> None:
    base = "class PreTrainedModel(nn.Module):\n    def post_init(self):\n        pass\n"
    error = run_apart(GENERATE, [save_odd(tmp_path / "based", head=base)])["based"]["error"]
    assert "modeling_odd.OddForCausalLM is not a model class of transformers" in error
