"""A tiny random model of a checkpoint's architecture: the object that every probe and proof looks at.

Sizes shrink by field name; what makes layers differ (layer types, windows, layers without RoPE) stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from onboard.analysis.composite import builds, small_composites
from onboard.analysis.few_experts import DENSE_LAYERS, few_experts
from onboard.analysis.tiny_mixers import shrink_mixers
from onboard.errors import ConsentRequiredError, OnboardError
from onboard.graph.architecture import causal_lm_class, decoder_config, is_composite, text_config

VOCABULARY = 131
WINDOW = 5
"""Shorter than any prompt that probes and proofs use."""
MAX_POSITIONS = 256
ORIGINAL_POSITIONS = 64
"""Where RoPE that scales with length switches; prompts lie on both sides of it."""
_MOST_LAYERS = 8

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "original_max_position_embeddings": ORIGINAL_POSITIONS,
    "sliding_window": WINDOW,
    "n_inner": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_layers": 2,
    "word_embed_proj_dim": 64,
    "rotary_dim": 8,
    "n_ctx": MAX_POSITIONS,
    "window_size": WINDOW,
    "max_seq_len": MAX_POSITIONS,
}
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def load_config(config: Mapping[str, Any], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the transformers config object of a parsed config.json whose architecture is a causal language model.

    Raises:
        ConsentRequiredError: the model needs code from its repository.
        OnboardError: unknown or non-causal architecture, or values that transformers refuses.
    """
    model_type = config.get("model_type")
    if config.get("auto_map") and model_type not in CONFIG_MAPPING_NAMES:
        _refuse_remote_code(trust_remote_code)
    _check_names(model_type, config.get("architectures"))
    if model_type not in CONFIG_MAPPING_NAMES:
        raise OnboardError(f"transformers has no architecture {model_type!r}", hint="Upgrade transformers")
    try:
        made = AutoConfig.for_model(model_type, **{key: value for key, value in config.items() if key != "model_type"})
    except Exception as error:
        raise OnboardError(f"transformers refuses this {model_type} config: {one_line(error)}") from error
    causal_lm_class(made)
    return decoder_config(made)


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a small config with every kind of layer that `config` has; towers of a composite are made small, too."""
    if not is_composite(config):
        return _tiny_decoder(config)
    try:
        small = list(small_composites(config, _tiny_decoder, VOCABULARY))
    except OnboardError:
        raise
    except Exception as error:
        raise OnboardError(f"cannot shrink the {config.model_type} config: {one_line(error)}") from error
    return next((item for item in small if builds(causal_lm_class(item), item)), small[-1])


def _tiny_decoder(config: PretrainedConfig) -> PretrainedConfig:
    native = {name: config.attribute_map.get(name, name) for name in (*_SIZES, "num_hidden_layers")}
    values = config.to_dict()
    heads, hidden = getattr(config, "num_attention_heads", 1), config.hidden_size
    for name, size in _SIZES.items():
        if values.get(native[name]) is not None:
            values[native[name]] = size
    if values.get("num_key_value_heads") is not None:
        values["num_key_value_heads"] = _kv_heads(values["num_key_value_heads"], heads)
    if values.get("head_dim") is not None:
        values["head_dim"] = 16 if values["head_dim"] * heads == hidden else 32
    for name in _TOKEN_IDS:
        if values.get(name) is not None:
            values[name] = _TOKEN_IDS.index(name)
    values |= few_experts(values)
    shrink_mixers(values, config.to_dict())
    _keep_layer_kinds(values, native["num_hidden_layers"], config.num_hidden_layers)
    head_dim = values.get("head_dim") or 16
    values = _shrink_rope(values, head_dim)
    try:
        return type(config).from_dict(values)
    except Exception as error:
        raise OnboardError(f"cannot shrink the {config.model_type} config: {one_line(error)}") from error


def build_tiny(config: PretrainedConfig, seed: int = 0) -> nn.Module:
    """Return the tiny transformers model: float32, evaluation mode, eager attention, every parameter random."""
    try:
        small = tiny_config(config)
        model = causal_lm_class(small)._from_config(small, attn_implementation="eager", dtype=torch.float32)
    except OnboardError:
        raise
    except Exception as error:
        raise OnboardError(f"transformers cannot build {config.model_type}: {one_line(error)}") from error
    randomize(model, seed)
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def randomize(model: nn.Module, seed: int) -> None:
    """Fill every floating-point tensor of the state dict, norm weights, biases and sinks too, with random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                scale, shift = (tensor.shape[-1] ** -0.5, 0.0) if tensor.dim() > 1 else (0.3, 0.7)
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + shift)


def layer_kind_names(config: PretrainedConfig) -> list[str]:
    """Return the kind of each decoder layer, as the config's per-layer lists tell it."""
    config = text_config(config)
    layers = config.num_hidden_layers
    types = _per_layer(config, "layer_types") or ["full_attention"] * layers
    rope = _per_layer(config, "no_rope_layers") or [True] * layers
    return [str(kind) if turned else f"{kind}_no_rope" for kind, turned in zip(types, rope, strict=True)]


def _per_layer(config: PretrainedConfig, name: str) -> list[Any] | None:
    value = getattr(config, name, None)
    return list(value) if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers else None


def prompt(start: int, length: int = 21, batch: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `position_ids` [batch, length]; row i begins at position start + 3 i."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch, length), generator=generator)
    positions = start + 3 * torch.arange(batch).unsqueeze(1) + torch.arange(length)
    return {"input_ids": ids, "position_ids": positions}


def prompts(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Return prompts for a transformers model, on both sides of `ORIGINAL_POSITIONS`.

    A model that counts positions by itself gets those that it counts: rows that begin at zero.
    """
    if not counts_positions(model):
        return [prompt(2, seed=1), prompt(ORIGINAL_POSITIONS + 6, seed=2)]
    return [_counted(prompt(0, seed=1)), _counted(prompt(0, length=ORIGINAL_POSITIONS + 6, seed=2))]


def counts_positions(model: nn.Module) -> bool:
    """Whether a transformers model pays no heed to `position_ids`: it counts tokens, or knows no positions."""
    inputs = prompt(0, seed=3)
    stretched = {**inputs, "position_ids": inputs["position_ids"] * 2}
    mask = torch.ones_like(inputs["input_ids"])  # without one, gaps count as the borders of packed sequences
    with torch.no_grad():
        one, other = (model(**item, attention_mask=mask, use_cache=False).logits for item in (inputs, stretched))
    return bool(torch.equal(one, other))


def _counted(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    batch, length = inputs["input_ids"].shape
    return {**inputs, "position_ids": torch.arange(length).expand(batch, length).contiguous()}


def _refuse_remote_code(trust_remote_code: bool) -> None:
    if not trust_remote_code:
        raise ConsentRequiredError(
            "this model runs code from its repository", hint="Read that code, then pass --trust-remote-code"
        )
    raise OnboardError("models that bring their own code cannot be analysed yet", hint="Use a native architecture")


def _check_names(model_type: object, architectures: object) -> None:
    names = architectures if isinstance(architectures, list) else []
    for name in (model_type, *names):
        if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name.replace("-", "_")):
            raise OnboardError(f"config.json names an architecture {name!r}, which is not an identifier")


def one_line(error: BaseException) -> str:
    """Return an exception as one line of text."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _kv_heads(kv_heads: int, heads: int) -> int:
    return {heads: 4, 1: 1}.get(kv_heads, 2)


def _keep_layer_kinds(values: dict[str, Any], layers_key: str, layers: int) -> None:
    """Keep the first layer of each kind, at least two layers; per-layer lists are cut to the kept layers."""
    lists = {key: value for key, value in values.items() if isinstance(value, list | tuple) and len(value) == layers}
    dense = {key: value for key in DENSE_LAYERS if type(value := values.get(key)) is int}
    kinds: dict[str, int] = {}
    for index in range(layers):
        firsts = [index < count for count in dense.values()]
        kinds.setdefault(repr([*firsts, *(value[index] for value in lists.values())]), index)
    kept = sorted(kinds.values())
    if len(kept) < 2:
        periods = [
            v for k, v in values.items() if re.search("interval|period|freq|pattern|every", k) and type(v) is int
        ]
        kept = list(range(min(layers, max(2, *periods, 2), _MOST_LAYERS)))
    for key, value in lists.items():
        values[key] = [value[index] for index in kept]
    for key, count in dense.items():
        values[key] = sum(index < count for index in kept)
    if layers_key in values:  # some configs count a list's entries instead
        values[layers_key] = len(kept)


def _shrink_rope(value: Any, head_dim: int) -> Any:
    """Shrink lengths and per-channel factors inside RoPE parameters, however deep they lie."""
    if not isinstance(value, dict):
        return value
    out = {key: _shrink_rope(item, head_dim) for key, item in value.items()}
    if out.get("original_max_position_embeddings") is not None:
        out["original_max_position_embeddings"] = ORIGINAL_POSITIONS
    rotary = int(head_dim * out.get("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if isinstance(factors := out.get(key), list) and factors:
            out[key] = [factors[index * len(factors) // rotary] for index in range(rotary)]
    return out
