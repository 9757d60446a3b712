"""Small GGUF files: a saved model's tensors as llama.cpp's converter names and changes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ARCHITECTURES = {
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
}
"""llama.cpp's name of a model type, where it is another."""


def write_gguf(
    source: Path,
    target: Path,
    kind: str = "F32",
    others: Mapping[str, torch.Tensor] | None = None,
    **more: Any,
) -> Path:
    """Write the checkpoint in `source` to the file `target`; matrices are of the type `kind`.

    `others` are tensors that the file has besides, in float32, and `more` further keys of the
    architecture. Returns the file.
    """
    import gguf

    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    tensors = load_file(source / "model.safetensors")
    names = gguf.get_tensor_name_map(_architecture(architecture), config["num_hidden_layers"])
    writer = gguf.GGUFWriter(target, architecture)
    describe(writer, config, more)
    for name, tensor in _stacked(tensors):
        stem, _, suffix = name.rpartition(".")
        values = _changed(name, tensor.float(), config, architecture).numpy()
        chosen = gguf.GGMLQuantizationType[kind if tensor.dim() > 1 else "F32"]
        data = gguf.quantize(values, chosen)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=chosen)
    for name, tensor in (others or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _architecture(name: str) -> Any:
    import gguf

    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


def describe(writer: Any, config: dict[str, Any], more: dict[str, Any]) -> None:
    """Write a config's sizes, a vocabulary of single characters, and further keys."""
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_epsilon"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if size := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    for key, value in more.items():
        writer.add_uint32(f"{writer.arch}.{key}", value)
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(chr(0x61 + index) for index in range(config["vocab_size"] - 3)),
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def rope_theta(config: dict[str, Any]) -> float:
    """Return the base of the rotation, that of full attention where there are several."""
    rope = config["rope_parameters"]
    return float(rope.get("full_attention", rope)["rope_theta"])


def _stacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, a layer's experts as one."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=_in_order):
        before, found, rest = name.partition(".experts.")
        if not found:
            yield name, tensors[name]
            continue
        stacks.setdefault(f"{before}.experts.{rest.partition('.')[2]}", []).append(tensors[name])
    yield from ((name, torch.stack(parts)) for name, parts in stacks.items())


def _in_order(name: str) -> list[str]:
    return [part.zfill(6) if part.isdigit() else part for part in name.split(".")]


def _changed(
    name: str, tensor: torch.Tensor, config: dict[str, Any], architecture: str
) -> torch.Tensor:
    """Return a tensor as `convert_hf_to_gguf.py` of llama.cpp changes it (`permute`, `norm_shift`)."""
    if architecture in ("llama", "granite") and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        rows = tensor.shape[0]
        return (
            tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:])
            .swapaxes(1, 2)
            .reshape(tensor.shape)
            .contiguous()
        )
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if name.endswith("shared_expert_gate.weight"):
        return tensor.squeeze(0)
    return tensor.contiguous()
