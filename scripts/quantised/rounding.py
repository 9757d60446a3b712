"""Checkpoints of GPTQ, AWQ and auto-round, written by auto-round without calibration; those that it
does not write (GPTQ's second version, groups out of order) are made from its files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.quantised.models import save_model
from scripts.quantised.record import Weights, fresh, record

Tensors = dict[str, torch.Tensor]


def write(
    folder: Path,
    form: str,
    *,
    shape: str = "qwen3",
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    layers: dict[str, dict[str, Any]] | None = None,
    after: Callable[[Path], None] | None = None,
    **changes: Any,
) -> None:
    """Write a random model of a shape in one of auto-round's formats; `after` changes the
    folder.
    """
    from auto_round import AutoRound

    with TemporaryDirectory() as temporary:
        source = save_model(Path(temporary) / "source", shape, torch.float16, **changes)
        rounding = AutoRound(
            AutoModelForCausalLM.from_pretrained(source, dtype="auto"),
            AutoTokenizer.from_pretrained(source),
            bits=bits,
            group_size=group,
            sym=symmetric,
            layer_config=layers,
            iters=0,
            disable_opt_rtn=True,
            device_map="cpu",
        )
        rounding.quantize_and_save(f"{temporary}/written", format=form)
        written = next(Path(temporary, "written").rglob("model.safetensors")).parent
        fresh(folder)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(written / name, folder / name)
        (folder / "model.safetensors").chmod(0o644)
    if after is not None:
        after(folder)
    record(folder, dequantised(folder))


def dequantised(folder: Path) -> Weights:
    """Return what auto-round's own modules take the weights for, in float32."""
    stored = load_file(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    awq = "awq" in settings["quant_method"] or "awq" in settings.get("packing_format", "")
    modules = [name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")]
    return {
        f"{module}.weight": (_awq if awq else _gptq)(stored, module, settings) for module in modules
    }


def _awq(stored: Tensors, module: str, settings: dict[str, Any]) -> torch.Tensor:
    from auto_round.export.export_to_awq.utils import dequantize_gemm

    parts = (stored[f"{module}.{name}"] for name in ("qweight", "qzeros"))
    scales = stored[f"{module}.scales"].float()
    return dequantize_gemm(*parts, scales, 4, settings["group_size"]).T.float()  # type: ignore[no-any-return]


def _gptq(stored: Tensors, module: str, settings: dict[str, Any]) -> torch.Tensor:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    own = settings.get("packing_format") == "auto_round"
    second = own or settings.get("checkpoint_format") == "gptq_v2"
    kind = (qlinear_torch if second else qlinear_torch_zp).QuantLinear
    words, outputs = stored[f"{module}.qweight"].shape
    bits = settings.get("extra_config", {}).get(module, {}).get("bits", settings["bits"])
    inputs = words * 32 // bits
    has_groups = f"{module}.g_idx" in stored
    rows = []
    # With g_idx the library's module has room for as many outputs as inputs.
    for first in range(0, outputs, inputs):
        count = min(inputs, outputs - first)
        linear = kind(bits, settings["group_size"], inputs, count, bias=False, g_idx=has_groups)
        linear.qweight = stored[f"{module}.qweight"][:, first : first + count]
        linear.scales = stored[f"{module}.scales"][:, first : first + count].float()
        place, width = first * bits // 32, count * bits // 32
        linear.qzeros = stored[f"{module}.qzeros"][:, place : place + width]
        if has_groups:
            linear.g_idx = stored[f"{module}.g_idx"]
        rows.append(linear(torch.eye(inputs)).T)
    return torch.cat(rows).contiguous()


def second_version(folder: Path) -> None:
    """Store zeros as they are, not less one, and say so in the config (GPTQModel's `gptq_v2`)."""
    stored = load_file(folder / "model.safetensors")
    bits = _edit(folder, checkpoint_format="gptq_v2")["bits"]
    for name in stored:
        if name.endswith(".qzeros"):
            stored[name] = packed(unpacked(stored[name], bits) + 1, bits)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def groups_out_of_order(folder: Path) -> None:
    """Give each input another group (`desc_act`), the codes as they are: another random model."""
    stored = load_file(folder / "model.safetensors")
    _edit(folder, desc_act=True, checkpoint_format="gptq")
    generator = torch.Generator().manual_seed(1)
    for name in stored:
        if name.endswith(".g_idx"):
            order = torch.randperm(len(stored[name]), generator=generator)
            stored[name] = stored[name][order].contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _edit(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change the quantization_config; return it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config, indent=2) + "\n")
    return config["quantization_config"]  # type: ignore[no-any-return]


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of int32 words along the last dimension, lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `unpacked`'s inverse."""
    places = torch.unflatten(numbers.long(), -1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return places.sum(-1).to(torch.int32)
