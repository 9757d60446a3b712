"""A llama spec, a model file written by hand for it, and the tests generated for it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from onboard.analysis.spec import LayerKind, ModelSpec
from onboard.codegen.equivalence_test import generate_test_file
from tests.unit.spec_samples import sample_block

_BLOCKS = {
    "LlamaRMSNorm": ("rmsnorm", "model.norm"),
    "LlamaRotaryEmbedding": ("rotary", "model.rotary_emb"),
    "LlamaMLP": ("mlp", "model.layers.0.mlp"),
    "LlamaAttention": ("attention", "model.layers.0.self_attn"),
    "LlamaDecoderLayer": ("decoder_layer", "model.layers.0"),
    "LlamaModel": ("model", "model"),
    "LlamaForCausalLM": ("causal_lm", ""),
}


_ROPE = sample_block("apply_rotary_pos_emb", "rope", source="modeling_llama.py:1")


@pytest.fixture(scope="session")
def llama_spec() -> ModelSpec:
    """What the analysis finds in a small llama checkpoint."""
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=500,
    )
    return ModelSpec(
        model="acme/llama",
        revision="0123abc",
        family="llama",
        architecture="LlamaForCausalLM",
        config_class="LlamaConfig",
        hf_module=modeling_llama.__name__,
        transformers_version="5.23.0",
        source_hash=hashlib.sha256(Path(modeling_llama.__file__).read_bytes()).hexdigest(),
        num_parameters=1,
        config={**config.to_diff_dict(), "architectures": ["LlamaForCausalLM"]},
        traits={},
        blocks=[
            sample_block(name, kind, path, "modeling_llama.py:1")
            for name, (kind, path) in _BLOCKS.items()
        ]
        + [_ROPE],
        layer_kinds=[LayerKind(name="full_attention", layers=[0, 1, 2], path="model.layers.0")],
    )


@pytest.fixture(scope="session")
def llama_files(llama_spec: ModelSpec) -> dict[str, str]:
    """Path under a root -> text of the model file and of its generated tests."""
    text = (
        Path(__file__)
        .parents[1]
        .joinpath("support", "reviewed", "modeling_llama.py")
        .read_text(encoding="utf-8")
    )
    header = {
        "TRANSFORMERS": llama_spec.transformers_version,
        "SOURCE_HASH": llama_spec.source_hash[:16],
        "REVISION": str(llama_spec.revision),
    }
    for key, value in header.items():
        text = text.replace(key, value)
    return {
        "models/modeling_llama.py": text,
        "tests/equivalence/test_llama_modeling.py": generate_test_file(llama_spec),
    }
