"""GGUF files, written by the gguf package. Its Python can quantise Q4_0 and Q8_0; the blocks of other
types are random bytes with scales of a sensible size, and its own dequantising says what they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from scripts.quantised.models import save_model
from scripts.quantised.record import fresh, record

Types = Mapping[str, str]
"""The type of a tensor by the end of its module's name; "" for all others."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(folder: Path, types: Types, *, shape: str = "qwen3", **changes: Any) -> None:
    """Write a random model of a shape as `model.gguf`."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize

    with TemporaryDirectory() as temporary:
        source = save_model(Path(temporary), shape, torch.float32, **changes)
        stored = load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        tokens = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    writer = GGUFWriter(fresh(folder) / "model.gguf", shape)
    _describe(writer, config, tokens)
    weights, others = {}, {}
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if tensor.ndim == 1:
            writer.add_tensor(f"{_name(module)}.weight", tensor.numpy())
            others[name] = tensor
            continue
        ending = next(end for end in types if module.endswith(end))
        kind = GGMLQuantizationType[types[ending]]
        heads = _heads(module, config) if shape == "llama" else 0
        data = _encoded(_interleaved(tensor, heads) if heads else tensor, kind)
        writer.add_tensor(f"{_name(module)}.weight", data, raw_dtype=kind)
        decoded = torch.from_numpy(dequantize(data, kind))
        weights[name] = _halves(decoded, heads) if heads else decoded
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    record(folder, weights, plain_config=config, others=others)


def _describe(writer: Any, config: dict[str, Any], tokens: dict[str, int]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    names = sorted(tokens, key=tokens.__getitem__)
    names += [f"<unused{index}>" for index in range(config["vocab_size"] - len(names))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * len(names))
    writer.add_token_types([1] * len(names))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _name(module: str) -> str:
    """Return llama.cpp's name of a module."""
    if module in NAMES:
        return NAMES[module]
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def _heads(module: str, config: dict[str, Any]) -> int:
    """Return how many heads' rows are in another order; llama.cpp rotates neighbours in its `llama`,
    transformers the two halves.
    """
    if module.endswith("q_proj"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if module.endswith("k_proj") else 0


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows as llama.cpp has them: of each head, one of the first half, one of the second."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return `_interleaved`'s inverse."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _encoded(weight: torch.Tensor, kind: Any) -> Any:
    """Return a weight's blocks, bytes [N, bytes of a row]."""
    from gguf import quants
    from gguf.constants import GGML_QUANT_SIZES

    if kind.name in ("Q4_0", "Q8_0"):
        return quants.quantize(weight.contiguous().numpy(), kind)
    elements, size = GGML_QUANT_SIZES[kind]
    count = weight.numel() // elements
    # The gguf package has no seed of its own.
    random = np.random.default_rng(int(weight.shape[0]) + int(kind))
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for place, value in _halves_of(kind.name):
        sizes = (value * random.uniform(0.5, 1.5, (count, 1))).astype(np.float16)
        blocks[:, place : place + 2] = sizes.view(np.uint8)
    if kind.name == "Q6_K":
        signed = random.integers(-40, 41, (count, 16), dtype=np.int8)
        blocks[:, 192:208] = signed.view(np.uint8)
    return blocks.reshape(weight.shape[0], -1)


def _halves_of(kind: str) -> Iterator[tuple[int, float]]:
    """Yield where a block has float16 numbers, and their size: with these the weights are around 0
    and of 0.06.
    """
    step = {"Q4_K": 4e-4, "Q5_K": 2e-4, "Q6_K": 1.4e-4}[kind]
    if kind == "Q6_K":
        yield 208, step
        return
    yield 0, step
    yield 2, step * {"Q4_K": 7.5, "Q5_K": 15.5}[kind]
