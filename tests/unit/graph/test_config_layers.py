"""A cut config keeps what its fields say of the layers that stay, and transformers builds a model
of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3nTextConfig, Gemma4TextConfig, PretrainedConfig, Qwen2MoeConfig

from onboard.graph.factory import ModelFactory

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 4,
}
KINDS = ["sliding_attention", "full_attention"] * 3
SHARED = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": KINDS}
SMALL = {"vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 4}


def _cut(config: PretrainedConfig, folder: Path, layers: int) -> tuple[Any, nn.Module]:
    config.save_pretrained(folder)
    factory = ModelFactory(
        folder, root=None, dtype=torch.float32, model_kwargs={"num_hidden_layers": layers}
    )
    return factory.config, factory.hf_model()


@pytest.mark.parametrize("layers", [2, 5])
def test_layers_that_share_keys_are_the_last_of_the_whole_model(
    layers: int, tmp_path: Path
) -> None:
    config = Gemma3nTextConfig(**SIZES, **SHARED, **SMALL, laurel_rank=4)
    cut, model = _cut(config, tmp_path, layers)
    assert cut.num_kv_shared_layers == max(0, layers - 4)
    assert cut.layer_types == KINDS[:layers]
    whole = ModelFactory(tmp_path, root=None, dtype=torch.float32, model_kwargs={}).hf_model()
    assert model.state_dict().keys() <= whole.state_dict().keys()


def test_fields_of_single_layers_go_with_their_layers(tmp_path: Path) -> None:
    own = {index: {"head_dim": 8 + 8 * index} for index in (1, 4)}
    config = Gemma4TextConfig(
        **SIZES, **SMALL, num_hidden_layers=6, layer_types=KINDS, per_layer_config=own
    )
    cut, _ = _cut(config, tmp_path, 2)
    assert set(map(int, cut.to_dict()["per_layer_config"])) == {1}


def test_indices_of_layers_that_are_gone_go(tmp_path: Path) -> None:
    config = Qwen2MoeConfig(
        **SIZES, num_hidden_layers=5, mlp_only_layers=[0, 3], num_experts=4, layer_types=None
    )
    cut, _ = _cut(config, tmp_path, 2)
    assert cut.mlp_only_layers == [0]
