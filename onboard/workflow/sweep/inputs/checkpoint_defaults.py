"""What checkpoints set and a config class's defaults leave out, by the names of the config's
fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

_Fields = Mapping[str, Any]

_WHERE_NONE: dict[str, Callable[[_Fields], Any]] = {
    "head_dim": lambda fields: fields["hidden_size"] // fields["num_attention_heads"],
    "num_key_value_heads": lambda fields: fields["num_attention_heads"],
    "n_routed_experts": lambda fields: 64,
    "n_shared_experts": lambda fields: 2,
    "num_experts_per_tok": lambda fields: 6,
    "default_language": lambda fields: fields["languages"][0],
    "hash_seed": lambda fields: 0,
    "attn_layer_indices": lambda fields: list(range(1, fields["num_hidden_layers"], 8)),
    "indexer_n_heads": lambda fields: 16,
    "indexer_kv_heads": lambda fields: 1,
    "indexer_head_dim": lambda fields: fields["head_dim"],
    "indexer_budget": lambda fields: 2048,
    "indexer_compress_ratio": lambda fields: 4,
    "image_token_id": lambda fields: _in_vocabulary(fields, 1),
    "video_token_id": lambda fields: _in_vocabulary(fields, 2),
    "audio_token_id": lambda fields: _in_vocabulary(fields, 3),
}
"""A field -> its value where it has none; the fields of the config are given."""
_WHERE_ONE = {"num_experts": 64, "moe_topk": 8, "moe_top_k": 2}
"""A mixture of one expert, or that takes one without a weight, tells nothing of its router."""

_CAUSAL = {"causal": True}
"""A field that says whether tokens see later ones -> its value in checkpoints for generation, where
there are any.
"""

_NO_EMBEDDINGS_OF_LAYERS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}


def _in_vocabulary(fields: _Fields, last: int) -> int | None:
    """Return one of the last tokens of a multimodal model's text model; None where no part is
    called so.
    """
    vocabulary = (fields.get("text_config") or {}).get("vocab_size")
    return vocabulary - last if type(vocabulary) is int else None


def default_config(model_type: str) -> PretrainedConfig:
    """Return the config that a model type's class makes of nothing, or of the least that it
    accepts.
    """
    try:
        return AutoConfig.for_model(model_type)
    except StrictDataclassError as error:
        if "per_layer_input" not in str(error):
            raise
    return AutoConfig.for_model(model_type, text_config=_NO_EMBEDDINGS_OF_LAYERS)


def complete(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config that a model can be made of, with every kind of layer that its class
    knows.
    """
    fields = config.to_dict()
    plain = {
        name: value(fields)
        for name, value in _WHERE_NONE.items()
        if name in fields and fields[name] is None
    }
    plain |= {name: value for name, value in _WHERE_ONE.items() if fields.get(name) == 1}
    rope = _rope(fields) | _bases(fields)
    changes = plain | _decoder(fields) | _kinds_of_layers(fields) | rope | _parts(config, fields)
    return type(config).from_dict(fields | changes) if changes else config


def _decoder(fields: _Fields) -> dict[str, Any]:
    """Where a class serves encoders too, a checkpoint for generation says that it is a decoder, and
    causal.
    """
    causal = {name: value for name, value in _CAUSAL.items() if name in fields}
    if fields.get("is_decoder") is not False:
        return causal
    # Attention in blocks of which some are random is an encoder's: no such block is causal.
    whole = (
        {"attention_type": "original_full"}
        if fields.get("attention_type") == "block_sparse"
        else {}
    )
    return {"is_decoder": True, **whole, **causal}


def _kinds_of_layers(fields: _Fields) -> dict[str, Any]:
    """Convolutions and attention in turn, where the defaults name no layer, or all of them, as
    attention.
    """
    count = fields.get("num_hidden_layers", 0)
    if "conv_L_cache" not in fields:
        return {}
    if fields.get("layer_types", ()) is None:
        return {
            "layer_types": ["conv" if index % 3 < 2 else "full_attention" for index in range(count)]
        }
    if fields.get("full_attn_idxs") == list(range(count)):
        return {"full_attn_idxs": list(range(2, count, 3)), "layer_types": None}
    return {}


def _rope(fields: _Fields) -> dict[str, Any]:
    """RoPE of each kind of layer, where it is asked for and there is none: windows with it, whole
    attention without.
    """
    if fields.get("rope_parameters") != {} or not fields.get("layer_types"):
        return {}
    kinds = [
        "full_attention" if index % 4 == 3 else "sliding_attention"
        for index in range(len(fields["layer_types"]))
    ]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "layer_types": kinds,
        "rope_parameters": {"sliding_attention": rope, "full_attention": None},
    }


def _bases(fields: _Fields) -> dict[str, Any]:
    """Bases of RoPE that differ from layer to layer, and layers without it, where each layer may
    have its own base.
    """
    bases = fields.get("layer_rope_theta") or []
    if len(set(bases)) != 1 or not bases[0]:
        return {}
    return {"layer_rope_theta": [base * (1, 0, 8)[index % 3] for index, base in enumerate(bases)]}


def _parts(config: PretrainedConfig, fields: _Fields) -> dict[str, Any]:
    """The configs inside this one, completed; attention's own has the base of RoPE and a clip."""
    changes: dict[str, Any] = {}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            own = complete(part).to_dict()
            if "kv_n_heads" in own:
                own = {"rope_theta": 10000.0} | own | {"clip_qkv": own.get("clip_qkv") or 8}
            if own != fields[name]:
                changes[name] = own
    return changes
