"""Transformers' own model where packages for one of its towers are missing: text runs as it does
with the tower.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from onboard.analysis.tiny.tiny_model import build_tiny
from onboard.analysis.tiny.tiny_prompts import prompt
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.errors import OnboardError
from onboard.graph.weight_load.rehearsed_load import rehearse_load
from onboard.graph.weight_load.safetensors_folder import TensorMeta
from onboard.hf import architecture
from onboard.hf.hf_model import build_reference, from_config, load_reference, missing_towers
from onboard.testing.models import hf_causal_lm

_LACKS = ImportError(
    "The tower requires the X library. You can install it with pip: `pip install x-images`."
)


def _without_package() -> Any:
    return mock.patch.object(SiglipVisionModel, "__init__", side_effect=_LACKS)


def test_text_runs_without_the_tower_as_with_it() -> None:
    whole: Any = build_tiny(AutoConfig.for_model("gemma3"))
    assert missing_towers(whole) == {}
    with _without_package():
        model = build_reference(
            whole.config, attn_implementation="eager", dtype=torch.float32
        ).eval()
    assert missing_towers(model) == {"model.vision_tower": ["x-images"]}
    left_out = model.load_state_dict(whole.state_dict(), strict=False)
    assert left_out.missing_keys == []
    assert all(name.startswith("model.vision_tower.") for name in left_out.unexpected_keys)
    inputs = prompt(0)
    expected, actual = (item(**inputs, use_cache=False).logits for item in (whole, model))
    assert torch.equal(actual, expected)


def test_the_towers_tensors_in_a_checkpoint_are_no_misfit() -> None:
    whole = build_tiny(AutoConfig.for_model("gemma3"))
    stored = {
        name: TensorMeta(tuple(each.shape), each.dtype, each.nbytes)
        for name, each in whole.state_dict().items()
    }
    with _without_package(), torch.device("meta"):
        model = build_reference(whole.config)
    rehearsal = rehearse_load(
        model, stored | {"model.vision_towers.x": TensorMeta((3,), torch.float32, 12)}
    )
    assert rehearsal.misfits == ["the model has no use for model.vision_towers.x"]
    assert rehearsal.facts == ["model.vision_tower is left out: it needs the packages x-images"]


def test_an_image_needs_the_packages_by_name() -> None:
    config = build_tiny(AutoConfig.for_model("gemma3")).config
    with _without_package():
        model: Any = build_reference(config)
    with pytest.raises(OnboardError, match="tower needs the packages x-images"):
        model.get_image_features(torch.zeros(1, 3, 8, 8))


def test_transformers_itself_is_left_as_it_is() -> None:
    config = build_tiny(AutoConfig.for_model("gemma3")).config
    with _without_package():
        build_reference(config)
        with pytest.raises(ImportError, match="x-images"):
            AutoModel.from_config(config.vision_config)


def test_code_that_refuses_eager_attention_gets_torchs() -> None:
    class Refusing:
        wrong = "only sdpa as attn_implementation"

        @classmethod
        def _from_config(cls, config: dict[str, Any], attn_implementation: str) -> Any:
            config["changed"] = config.get("changed", 0) + 1
            if attn_implementation == "eager":
                raise ValueError(cls.wrong)
            return attn_implementation, config["changed"]

    assert from_config(Refusing, {}, attn_implementation="eager") == ("sdpa", 1)
    Refusing.wrong = "hidden_size"
    with pytest.raises(ValueError, match="hidden_size"):
        from_config(Refusing, {}, attn_implementation="eager")


def test_code_that_asserts_another_attention_than_eager_gets_torchs(tmp_path: Path) -> None:
    written = tmp_path / "asserting.py"  # where pytest says nothing of what is asserted
    written.write_text(
        "def _from_config(config, attn_implementation):\n"
        "    assert attn_implementation in ['sdpa', 'flash_attention_2']\n"
        "    assert config['layers'] > 0\n"
        "    return attn_implementation\n"
    )
    names: dict[str, Any] = {}
    exec(compile(written.read_text(), str(written), "exec"), names)
    asserting = SimpleNamespace(**names)
    assert from_config(asserting, {"layers": 1}, attn_implementation="eager") == "sdpa"
    with pytest.raises(AssertionError):
        from_config(asserting, {"layers": 0}, attn_implementation="sdpa")


class _Mixing(LlamaPreTrainedModel):
    """Its constructor multiplies a matrix in float32 by one of the default dtype."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        made = torch.eye(4, dtype=torch.float32) @ torch.randn(4, 4)
        self.table = nn.Parameter(made)
        self.register_buffer("count", torch.arange(3))
        self.post_init()


@pytest.mark.parametrize("told", [{}, {"dtype": torch.bfloat16}])
def test_a_constructor_that_mixes_dtypes_runs_in_float32(told: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="dtype"):
        _Mixing._from_config(copy.deepcopy(config), **told)
    model = from_config(_Mixing, config, **told)
    assert model.table.dtype == told.get("dtype", torch.float16)
    assert model.count.dtype == torch.int64
    assert torch.get_default_dtype() == torch.float32


def test_what_fails_in_float32_too_says_so() -> None:
    class Failing(_Mixing):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            raise RuntimeError("too small")

    with pytest.raises(RuntimeError, match="too small"):
        from_config(Failing, AutoConfig.for_model("llama", dtype=torch.float16))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize("width", [9, 10, 12, 24])
def test_experts_of_any_size_run(model_type: str, width: int, tmp_path: Path) -> None:
    """Torch's grouped product takes rows of whole 16 bytes; experts one by one take any."""
    sizes = {"intermediate_size": width, "moe_intermediate_size": width, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        hidden_size=16,
        head_dim=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        **sizes,
    )
    for name in ("num_experts", "num_local_experts"):
        if hasattr(config, name):
            setattr(config, name, 4)
    made = build_reference(copy.deepcopy(config), dtype=torch.float32).eval()
    made.save_pretrained(tmp_path)
    read = load_reference(config, tmp_path, dtype=torch.float32).eval()
    assert (read.config._experts_implementation == "eager") == (width % 8 > 0)
    tested = hf_causal_lm(type(made), config, seed=0)
    assert tested.config._experts_implementation == read.config._experts_implementation
    one_by_one = type(made).from_pretrained(tmp_path, experts_implementation="eager").eval()
    expected = one_by_one(**prompt(0), use_cache=False).logits
    for model in (made, read):
        torch.testing.assert_close(model(**prompt(0), use_cache=False).logits, expected)


def test_what_transformers_prints_of_classes_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does as it imports a class whose docs lack something; in answers that is no text."""

    class Talking(dict[type, Any]):
        def __getitem__(self, key: type) -> Any:
            print("[ERROR] No checkpoint found")
            return super().__getitem__(key)

    config, found = AutoConfig.for_model("llama"), SimpleNamespace(__name__="Found")
    tables = SimpleNamespace(
        MODEL_FOR_CAUSAL_LM_MAPPING=Talking({type(config): found}),
        MODEL_FOR_MULTIMODAL_LM_MAPPING={},
    )
    monkeypatch.setattr(architecture, "_auto_classes", lambda: tables)
    assert architecture.find_language_model(config) is found
    assert capsys.readouterr().out == ""
