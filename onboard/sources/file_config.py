"""A config.json for a GGUF file that has none beside it: what its metadata say, as transformers names
it.

Metadata say less than configs: only architectures of which they say all are read so, and only where
each of their keys is understood.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from onboard.errors import OnboardError
from onboard.sources.gguf_architectures import Architecture, architectures
from onboard.sources.gguf_header import GgufHeader

_FURTHER = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
"""Keys that transformers' own mapping leaves out of some architectures."""
_COMPARED = {"attention.value_length", "rope.dimension_count", "vocab_size"}
_ROTATION = {
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "padding_token_id": "pad_token_id",
}
_FILE_TYPES = {0: "float32", 1: "float16"}
"""Of general.file_type; others have quantised weights, or bfloat16."""


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the config of a file's model; raise `OnboardError` where its metadata do not say all of
    it, or something that is not understood.
    """
    from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = architectures().get(header.architecture, Architecture())
    model_type = known.model_type
    if model_type is None or (header.of_model("expert_count") and known.no_mixtures):
        raise _needs_config(f"do not say all of a config of {header.architecture[:60]!r}")
    if any(name.startswith("rope_f") for name in header.tensors):
        raise _needs_config("have factors of the rotation, and not what these come from")
    return {
        "model_type": model_type,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}),
        **dict(_sizes(header, model_type)),
        **dict(_traits_of_tensors(header, known)),
        "rope_parameters": _rotation(header),
        **{
            name: header.values[f"tokenizer.ggml.{key}"]
            for key, name in _TOKENS.items()
            if f"tokenizer.ggml.{key}" in header.values
        },
        "dtype": _FILE_TYPES.get(header.values.get("general.file_type", -1), "bfloat16"),
    }


def _needs_config(what: str) -> OnboardError:
    return OnboardError(
        f"the GGUF file's metadata {what}",
        hint="Put the config.json of the model that it was made of beside it",
    )


def _sizes(header: GgufHeader, model_type: str) -> Iterator[tuple[str, Any]]:
    """Yield the config's keys and values of the architecture's own metadata."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    known: Mapping[str, str | None] = {**_FURTHER, **GGUF_CONFIG_MAPPING[model_type]}
    prefix = f"{header.architecture}."
    for name, value in header.values.items():
        key = name.removeprefix(prefix)
        if not name.startswith(prefix) or key in _ROTATION | _COMPARED:
            continue
        if (to := known.get(key) or _FURTHER.get(key)) is None:
            raise _needs_config(f"have {name[:60]!r}, which onboard does not know")
        if not isinstance(value, int | float):
            raise _needs_config(f"have {name[:60]!r}, which is no number")
        yield to, shortest(value) if isinstance(value, float) else value
    _require_alike(header)


def _require_alike(header: GgufHeader) -> None:
    """Raise `OnboardError` where values are of another length than keys, or a part of a head is not
    rotated.
    """
    heads, width = header.of_model("attention.head_count"), header.of_model("embedding_length")
    if type(heads) is not int or type(width) is not int or not heads:
        raise _needs_config("do not say how many heads there are")
    length = header.of_model("attention.key_length") or width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.of_model(key) not in (None, length):
            raise _needs_config(f"have {key} other than a head's {length}")


def _traits_of_tensors(header: GgufHeader, known: Architecture) -> Iterator[tuple[str, Any]]:
    """Yield what the tensors show: tied embeddings, biases, the size of the vocabulary."""
    tensors = header.tensors
    yield "tie_word_embeddings", "output.weight" not in tensors
    if "token_embd.weight" in tensors:
        yield "vocab_size", tensors["token_embd.weight"].shape[0]
    if known.attention_bias:
        yield "attention_bias", "blk.0.attn_q.bias" in tensors


def _rotation(header: GgufHeader) -> dict[str, Any]:
    """Return the `rope_parameters`."""
    theta = float(header.of_model("rope.freq_base") or 10000.0)
    kind = str(header.of_model("rope.scaling.type") or "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = header.of_model("rope.scaling.factor")
    original = header.of_model("rope.scaling.original_context_length")
    if kind not in ("linear", "yarn") or not factor or (kind == "yarn" and not original):
        raise _needs_config(f"have a rotation of the kind {kind[:60]!r}")
    found = {"rope_type": kind, "rope_theta": theta, "factor": shortest(float(factor))}
    return found | ({"original_max_position_embeddings": original} if kind == "yarn" else {})


def shortest(value: float) -> float:
    """Return the number with the fewest digits that is the same in float32: 1e-6 of
    9.999999974752427e-07.
    """
    stored = struct.pack("<f", value)
    digits = (float(f"{value:.{count}g}") for count in range(1, 9))
    return next((each for each in digits if struct.pack("<f", each) == stored), value)
