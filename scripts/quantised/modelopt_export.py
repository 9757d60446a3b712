"""Checkpoints of ModelOpt, written by its own export."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scripts.quantised.models import save_model
from scripts.quantised.record import IDS, Activation, Weights, fresh, record

Tensors = dict[str, torch.Tensor]
FILES = ("config.json", "hf_quant_config.json", "model.safetensors")


def write(
    folder: Path, scheme: str, *, shape: str = "qwen3", kv_cache: bool = False, **changes: Any
) -> None:
    """Write a random model of a shape in a scheme of `modelopt.torch.quantization`."""
    with TemporaryDirectory() as temporary:
        source = save_model(Path(temporary) / "source", shape, **changes)
        _export(source, scheme, kv_cache, Path(temporary) / "written")
        fresh(folder)
        for name in FILES:
            shutil.copy(Path(temporary) / "written" / name, folder / name)
    settings = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    stored = load_file(folder / "model.safetensors")
    weights = dequantised(stored, settings["quant_algo"])
    stacks = stacked(stored, settings["quant_algo"])
    activation = None if stacks else _activation(stored, settings["quant_algo"])
    record(
        folder, {**weights, **stacks}, transposed=True, activation=activation, cache=_cache(stored)
    )


def _export(source: Path, scheme: str, kv_cache: bool, target: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = copy.deepcopy(getattr(mtq, scheme))
    if kv_cache:
        cache = mtq.FP8_KV_CFG["quant_cfg"]
        config = mtq.utils.update_quant_cfg_with_kv_cache_quant(config, cache)
    rows = [torch.tensor([[(token * (row + 3)) % 64 for token in IDS]]) for row in range(4)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    quantised = mtq.quantize(model, config, lambda model: [model(row) for row in rows])
    export_hf_checkpoint(quantised, export_dir=target)


def dequantised(stored: Tensors, scheme: str) -> Weights:
    """Return the weights of a scheme in float32, times `pre_quant_scale`."""
    found = {}
    for name in [name for name in stored if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        scales = [stored.get(f"{module}.weight_scale{end}") for end in ("", "_2")]
        weight = _DEQUANTISE[scheme](stored[f"{module}.weight"], *scales)
        found[f"{module}.weight"] = weight * _before(stored, module)
    return found


def stacked(stored: Tensors, scheme: str) -> Weights:
    """Return the experts in one tensor, [experts, inputs, outputs] there, as [..., outputs, inputs]."""
    found = {}
    for name in [name for name in stored if name.endswith("_proj_weight_scale")]:
        stack = name.removesuffix("_weight_scale")
        scale, whole = stored[name], stored.get(f"{name}_2")
        scales = scale.mT if scale.ndim else scale.expand(len(stored[stack]))
        each = zip(stored[stack].mT, scales, strict=True)
        found[stack] = torch.stack([_DEQUANTISE[scheme](w, s, whole) for w, s in each])
    return found


def _before(stored: Tensors, module: str) -> torch.Tensor:
    """Return what a linear's input is multiplied by first."""
    return stored.get(f"{module}.pre_quant_scale", torch.ones(1)).float()


def _cache(stored: Tensors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the scales of keys and values by attention module; they are at `k_proj` and
    `v_proj`.
    """
    ending = ".k_proj.k_scale"
    modules = [name.removesuffix(ending) for name in stored if name.endswith(ending)]
    return {
        module: (stored[f"{module}.k_proj.k_scale"], stored[f"{module}.v_proj.v_scale"])
        for module in modules
    }


def _eight_bits(weight: torch.Tensor, scale: torch.Tensor, _: object) -> torch.Tensor:
    """[N, K] with a scale for the tensor or for each output."""
    return weight.float() * (scale.unsqueeze(-1) if scale.ndim else scale)


def _blocks(weight: torch.Tensor, scale: torch.Tensor, _: object) -> torch.Tensor:
    """[N, K] with scales [N / 128, 1, K / 128, 1] of 128 x 128, or one without dimensions."""
    from modelopt.torch.quantization.qtensor import FP8QTensor

    grid = scale.reshape(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    tensor = FP8QTensor(weight.shape, torch.float32, weight)
    sizes = {-1: 128, -2: 128}
    return tensor.dequantize(torch.float32, scale=grid, block_sizes=sizes)  # type: ignore[no-any-return]


def _nvfp4(weight: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Bytes [N, K / 2], scales [N, K / 16] float8 and one of the tensor."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    shape = torch.Size((weight.shape[0], weight.shape[1] * 2))
    tensor = NVFP4QTensor(shape, torch.float32, weight)
    sizes = {-1: 16}
    return tensor.dequantize(  # type: ignore[no-any-return]
        torch.float32, scale=scale, double_scale=whole, block_sizes=sizes
    )


def _int4(weight: torch.Tensor, scale: torch.Tensor, _: object) -> torch.Tensor:
    """Bytes of two outputs [N / 2, K], the first one low, in two's complement; scales [N, K / 128].
    By hand: the library has no inverse. `weight_scale_2` (W4A8) is no part of the weight: it is the
    scale of the eight-bit float that a kernel turns it into.
    """
    codes = torch.stack([weight & 15, weight >> 4], dim=1).flatten(0, 1).float()
    codes = torch.where(codes > 7, codes - 16, codes)
    return codes * scale.repeat_interleave(128, 1)


def _mxfp8(weight: torch.Tensor, scale: torch.Tensor, _: object) -> torch.Tensor:
    """[N, K] with exponents [N, K / 32]."""
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    tensor = MXFP8QTensor(weight.shape, torch.float32, weight)
    return tensor.dequantize(torch.float32, scale=scale)  # type: ignore[no-any-return]


_DEQUANTISE: dict[str, Callable[..., torch.Tensor]] = {
    "FP8": _eight_bits,
    "FP8_PER_CHANNEL_PER_TOKEN": _eight_bits,
    "fp8_pb_wo": _blocks,
    "NVFP4": _nvfp4,
    "W4A16_AWQ": _int4,
    "W4A8_AWQ": _int4,
    "MXFP8": _mxfp8,
}


def _activation(stored: Tensors, scheme: str) -> Activation | None:
    """Return how a scheme quantises the inputs of linears; None where it does not."""
    if scheme not in _QUANTISE:
        return None

    def activation(module: str, x: torch.Tensor) -> torch.Tensor:
        if f"{module}.weight_scale" not in stored:
            return x
        before = _before(stored, module)
        return _QUANTISE[scheme](x * before, stored.get(f"{module}.input_scale")) / before

    return activation


def _by_tensor(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _by_token(x: torch.Tensor, _: None) -> torch.Tensor:
    return _by_tensor(x, x.abs().amax(-1, keepdim=True) / 448)


def _by_sixteen(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensor, scales, _ = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=scale)
    return tensor.dequantize(  # type: ignore[no-any-return]
        torch.float32, scale=scales, double_scale=scale, block_sizes={-1: 16}
    )


def _by_thirty_two(x: torch.Tensor, _: None) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    tensor, scales = MXFP8QTensor.quantize(x)
    return tensor.dequantize(torch.float32, scale=scales)  # type: ignore[no-any-return]


_QUANTISE: dict[str, Callable[..., torch.Tensor]] = {
    "FP8": _by_tensor,
    "W4A8_AWQ": _by_tensor,
    "FP8_PER_CHANNEL_PER_TOKEN": _by_token,
    "NVFP4": _by_sixteen,
    "MXFP8": _by_thirty_two,
}
