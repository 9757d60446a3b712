"""Modules are taken apart, and what is put together has what it needs and nothing else."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from transformers import MistralConfig

from onboard import modeling
from onboard.errors import OnboardError
from onboard.plain_config import PlainConfig
from onboard.standalone import loader
from onboard.standalone.bundle import Bundle, foreign_packages
from onboard.standalone.exported_text import with_functions
from onboard.standalone.split_head import split_head
from onboard.standalone.statements import Module
from onboard.standalone.vllm_plugin import with_paged_attention

TEXT = '''"""A model."""

from __future__ import annotations

import torch
from torch import nn

import onboard.ops  # noqa: F401  (registers)
from onboard.modeling import CausalLMOutput, register_causal_lm


class Net(nn.Module):
    """Ümläute before a call."""

    def __init__(self, config):
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> CausalLMOutput:
        """Return the logits."""
        x = self.a(input_ids)
        x = torch.ops.onboard.torch_attention(x, x, x) + torch.ops.onboard.torch_l2norm(x, 1e-6)
        return CausalLMOutput(logits=HEAD)


register_causal_lm("Config", Net)
'''


def _functions(files: dict[str, str], path: str) -> set[str]:
    return {
        node.name
        for node in ast.parse(files[path]).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def test_a_bundle_has_what_is_called_and_what_that_needs() -> None:
    bundle = Bundle()
    bundle.add("model.py", with_functions(TEXT.replace("HEAD", "x")))
    files = bundle.files()
    assert "torch.ops" not in files["model.py"]
    assert "from .ops.attention.attention import torch_attention\n" in files["model.py"]
    assert _functions(files, "ops/norm/norm.py") == {"torch_l2norm"}
    attention = _functions(files, "ops/attention/attention.py")
    assert {"torch_attention", "_explicit_attention", "_alibi"} <= attention
    assert not {"torch_attention_sdpa", "torch_attention_repeat_kv"} & attention
    assert "register_op" not in "".join(files.values())
    assert "register_dataclass(CausalLMOutput)" in files["modeling.py"]
    assert _functions(files, "modeling.py") == {"CausalLMOutput", "register_causal_lm"}
    assert foreign_packages(files) >= {"torch"}
    assert not {"onboard", "transformers", "pydantic"} & foreign_packages(files)


def test_an_op_of_an_extension_does_not_go_along() -> None:
    with pytest.raises(OnboardError, match="calls my_op, an op of an extension"):
        with_functions(TEXT.replace("torch_l2norm", "my_op"))


def test_attention_becomes_a_layer_and_the_head_a_method() -> None:
    text = TEXT.replace("        x = self.a(input_ids)\n", "").replace(
        "(x, x, x)", "(*self.a(input_ids))"
    )
    made = ast.parse(with_paged_attention(text.replace("HEAD", "self.a(x)")))
    [net] = [node for node in made.body if isinstance(node, ast.ClassDef)]
    methods = {
        node.name: ast.unparse(node) for node in net.body if isinstance(node, ast.FunctionDef)
    }
    assert "super().__init__()\n    self.paged_attention = PagedAttention()" in methods["__init__"]
    assert "x = self.paged_attention(*self.a(input_ids)) + torch.ops" in methods["forward"]
    assert methods["forward"].endswith("return x")
    assert methods["logits"].endswith("return CausalLMOutput(logits=self.a(x))")
    assert "from .paged_attention import PagedAttention" in ast.unparse(made)


@pytest.mark.parametrize("head", ["self.a(x) * position_ids", "self.a(input_ids)"])
def test_a_head_that_needs_more_than_the_states_is_refused(head: str) -> None:
    text = TEXT.replace("HEAD", head).replace("        x = torch.ops", "        y = torch.ops")
    with pytest.raises(OnboardError, match="head needs more"):
        split_head(Module("onboard.model", text))


class OwnConfig(PlainConfig):
    """What a generated file defines for the config of a repository whose type transformers knows."""

    model_type = "mistral_own_code"


def test_a_config_of_own_code_is_read_by_the_class_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling, "_CONFIGS", {"mistral_own_code": OwnConfig})
    monkeypatch.setattr(modeling, "_MODELS", {"OwnConfig": object})
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    for code, expected in ((own, OwnConfig), ({}, MistralConfig)):
        config = {"model_type": "mistral", "hidden_size": 48, "marker": 7, **code}
        (tmp_path / "config.json").write_text(json.dumps(config))
        read = loader.read_config(tmp_path)
        assert type(read) is expected
        assert (read.hidden_size, read.marker) == (48, 7)
