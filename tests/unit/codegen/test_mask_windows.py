"""Windows that only masks have: given to attention, or asserted away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, masking_utils

from onboard.analysis.analyze import analyze
from onboard.codegen.model_file import generate_model_file
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code, Mask
from onboard.codegen.translate.mechanisms.attention.windows import _cuts
from onboard.codegen.translate.output.printer import print_block
from onboard.errors import OnboardError
from onboard.graph.factory import ModelFactory
from onboard.verify.blocks import prove

Translate = Callable[..., tuple[Any, str, str]]

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
MIXTURE = {
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "intermediate_size": 16,
}


def _build(folder: Path, model_type: str, **fields: object) -> torch.nn.Module:
    """Build what ships for a config that was never onboarded."""
    AutoConfig.for_model(model_type, **SIZES, **fields).save_pretrained(folder)
    return ModelFactory(folder, root=None, dtype=torch.float32, model_kwargs={}).build_model()


def test_attention_that_passes_no_window_gets_that_of_the_mask() -> None:
    config = AutoConfig.for_model(
        "phimoe", **SIZES, sliding_window=5, num_local_experts=4
    ).to_dict()
    spec = analyze(config, model="acme/tiny")
    text = generate_model_file(spec)
    assert "self.config.sliding_window" in text
    assert prove(text, spec, export=False)
    assert prove(text, analyze(config | {"sliding_window": None}, model="acme/tiny"), export=False)


def test_a_window_that_a_mask_has_before_it_gets_to_attention_is_asserted_away() -> None:
    config = AutoConfig.for_model("doge", **SIZES).to_dict()
    spec = analyze(config, model="acme/tiny")
    text = generate_model_file(spec)
    assert "self.config.sliding_window" not in text
    assert prove(text, spec, export=False)
    with pytest.raises(OnboardError, match="does not cover this config: sliding_window"):
        prove(text, analyze(config | {"sliding_window": 5}, model="acme/tiny"), export=False)


def test_scores_that_a_mask_with_a_window_fills_are_filled_in_the_window() -> None:
    config = AutoConfig.for_model("doge", **SIZES, sliding_window=5, keep_window_size=3).to_dict()
    spec = analyze(config, model="acme/tiny")
    text = generate_model_file(spec)
    assert ".tril(-self.config.sliding_window)" in text
    assert prove(text, spec, export=False)
    with pytest.raises(OnboardError, match="covered only with sliding_window"):
        prove(text, analyze(config | {"sliding_window": None}, model="acme/tiny"), export=False)


def test_masks_with_a_window_are_told_by_what_they_hide() -> None:
    kinds = (
        "causal_mask",
        "sliding_window_causal_mask",
        "chunked_causal_mask",
        "masks_for_generate",
    )
    windowed = [kind for kind in kinds if _cuts(getattr(masking_utils, f"create_{kind}"))]
    assert windowed == ["sliding_window_causal_mask", "masks_for_generate"]


def test_a_file_without_windows_refuses_layers_that_have_one(tmp_path: Path) -> None:
    sliding = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 2,
    }
    with pytest.raises(
        OnboardError, match="does not serve this model.*'sliding_attention' not in layer_types"
    ):
        _build(tmp_path, "qwen2_moe", **MIXTURE, **sliding)
    assert _build(tmp_path, "qwen2_moe", **MIXTURE)


def test_a_window_of_the_layer_types_that_attention_does_not_get(tmp_path: Path) -> None:
    fields = {
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "pad_token_id": 0,
    }
    with pytest.raises(OnboardError, match="attention of layer 1 has no window"):
        _build(tmp_path, "smollm3", **fields)
    assert _build(tmp_path, "smollm3", **fields, use_sliding_window=True)


def test_interleaved_rope_switches_frequencies() -> None:
    factors = {"short_factor": [1.1, 1.2, 1.3, 1.4], "long_factor": [2.1, 3.2, 4.3, 5.4]}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "factor": 4.0,
    }
    config = AutoConfig.for_model("cohere", **SIZES, rope_parameters=rope | factors).to_dict()
    spec = analyze(config, model="acme/tiny")
    assert prove(generate_model_file(spec), spec)


def test_layers_that_are_called_sliding_get_the_window_of_their_masks() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    given = {"use_sliding_window": True, "sliding_window": 5, **kinds}
    config = AutoConfig.for_model("qwen2_moe", **SIZES, **given, num_experts=4).to_dict()
    text = generate_model_file(analyze(config, model="acme/tiny"))
    assert 'self.config.layer_types[self.layer_idx] == "sliding_attention"' in text
    assert prove(
        text,
        analyze(config | {"layer_types": kinds["layer_types"][::-1]}, model="acme/tiny"),
        export=False,
    )


_CUTS = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.is_sliding = index % 2 == 0
        self.cut = config.sliding_window
        self.sliding_window = config.sliding_window if index % 2 == 0 else None

    def forward(self, x, mask, positions):
        if self.is_sliding and mask is not None:
            seen = max(positions.shape[0], self.cut)
            before = torch.tril(torch.ones_like(mask, dtype=torch.bool), diagonal=-self.cut)
            mask = torch.where(before, torch.finfo(x.dtype).min, mask)
            mask = mask[:, :, :, max(0, 3 - seen) : max(0, 3 - seen) + seen]
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return attend(self, x, x, x, mask, scaling=1.0{window})[0]

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, index) for index in range(2)])

    def forward(self, x, positions, mask=None):
        for layer in self.layers:
            x = layer(x, mask, positions)
        return x
"""


def test_a_mask_that_some_layers_cut_is_attentions_own_window(translate: Translate) -> None:
    given = {"mask": Mask(whole=True), "positions": Code(name("positions"))}
    told, untold = (
        _CUTS.format(window=text) for text in (", sliding_window=self.sliding_window", "")
    )
    state, _, _ = translate(told, {"sliding_window": 5}, specialised=True, **given)
    found = next(item for cls, item in state.translator.states.items() if cls.__name__ == "Layer")
    layer = print_block(found.methods["forward"].body)
    assert "torch_attention" in layer
    assert "self.sliding_window" in layer
    assert "tril" not in layer
    with pytest.raises(Untranslatable, match="a window that only its mask has"):
        translate(untold, {"sliding_window": 5}, specialised=True, **given)
