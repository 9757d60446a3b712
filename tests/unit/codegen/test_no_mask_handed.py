"""Code that hands attention no mask: PyTorch's, which users get, hides later tokens by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

HEAD = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, :, : key.shape[-2]]
    return (F.softmax(scores, dim=-1) @ value).transpose(1, 2).contiguous(), None
"""
CALL = """
attend = eager_attention_forward
if self.config._attn_implementation != "eager":
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
y, _ = attend(self, q, k, v, None, scaling=self.size**-0.5)
return self.out(y.reshape(b, t, -1))
"""


def saved(folder: Path) -> Path:
    save_odd(folder, head=HEAD, attention=ATTENTION.split("scores =")[0] + CALL)
    file, theta = folder / "modeling_odd.py", "        self.theta = config.rope_theta\n"
    text = file.read_text().replace(
        theta, f"{theta}        self.config = config\n        self.is_causal = True\n"
    )
    prefix = '    base_model_prefix = "model"\n'
    file.write_text(text.replace(prefix, f"{prefix}    _supports_sdpa = True\n"))
    return folder


def test_it_is_what_the_attention_does_that_users_get(tmp_path: Path) -> None:
    found = run_apart(GENERATE, [saved(tmp_path / "no_mask")])["no_mask"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "eager attention of modeling_odd hides later tokens where no mask does" in found["facts"]


def test_a_module_that_is_not_there_has_no_text_to_look_at(tmp_path: Path) -> None:
    folder = saved(tmp_path / "no_mask")
    file = folder / "modeling_odd.py"
    later = "def later():\n    from .linear_attention import linear\n"
    file.write_text(file.read_text().replace(HEAD, later + HEAD))
    found = run_apart(GENERATE, [folder])["no_mask"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5


@pytest.mark.parametrize("eager", ["by the config", "by the class"])
def test_eager_attention_that_is_asked_for_looks_ahead(eager: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "no_mask")
    if eager == "by the config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "eager"}))
    else:
        file = folder / "modeling_odd.py"
        file.write_text(file.read_text().replace("_supports_sdpa = True", "_supports_sdpa = False"))
    assert "is not causal" in run_apart(GENERATE, [folder])["no_mask"]["error"]
