"""gpt-oss with its experts in MXFP4, by hand: transformers' own quantiser needs a GPU.

`*_blocks` uint8 [experts, outputs, inputs / 32, 16] has two four-bit floats in a byte, the first in
the low bits; `*_scales` uint8 [experts, outputs, inputs / 32] has exponents with 127 added. The
unquantised parameter is [experts, inputs, outputs].
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from scripts.quantised.models import save_model
from scripts.quantised.record import fresh, record

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_CONVERTED = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]


def write(folder: Path) -> None:
    """Write a random gpt-oss."""
    with TemporaryDirectory() as temporary:
        source = save_model(Path(temporary), "gpt_oss")
        stored = load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
    weights = {}
    for name in [name for name in stored if name.endswith("experts.gate_up_proj")] + [
        name for name in stored if name.endswith("experts.down_proj")
    ]:
        blocks, scales, values = encoded(stored.pop(name).float().transpose(1, 2))
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        weights[name] = values
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": NOT_CONVERTED,
    }
    (fresh(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    record(folder, weights, transposed=True)


def encoded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks, scales and what they stand for, of a weight [..., outputs, inputs]."""
    groups = torch.unflatten(weight, -1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    code = (scaled.abs().unsqueeze(-1) - LEVELS).abs().argmin(-1)
    values = LEVELS[code] * scaled.sign() * torch.exp2(exponent).unsqueeze(-1)
    code = (code + 8 * (scaled < 0)).to(torch.uint8)
    blocks = code[..., ::2] | (code[..., 1::2] << 4)
    return blocks.contiguous(), (exponent + 127).to(torch.uint8), values.flatten(-2)
