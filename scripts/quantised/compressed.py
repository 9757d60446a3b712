"""Checkpoints of compressed-tensors, written by llmcompressor."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from scripts.quantised.models import save_model
from scripts.quantised.record import IDS, Activation, Weights, fresh, record

Groups = Sequence[tuple[str, Sequence[str], Mapping[str, Any]]]
"""Presets of compressed-tensors, the modules that each is for, and what it has else of weights."""
Tensors = Mapping[str, torch.Tensor]
Schemes = Mapping[str, Any]
"""Each quantised module's scheme."""
EVERY_LINEAR = ("Linear",)


def write(
    folder: Path,
    schemes: Sequence[str] = (),
    *,
    shape: str = "qwen3",
    groups: Groups = (),
    ignore: Sequence[str] = ("lm_head",),
    kv_cache: bool = False,
    arguments: dict[str, Any] | None = None,
    gptq: bool = False,
    after: Callable[[Path], None] | None = None,
    **changes: Any,
) -> None:
    """Write a random model of a shape in one preset scheme, or in several `groups`; `after` changes
    the folder.
    """
    groups = groups or [(scheme, EVERY_LINEAR, arguments or {}) for scheme in schemes]
    with TemporaryDirectory() as temporary:
        source = save_model(Path(temporary) / "source", shape, **changes)
        model = _compress(source, _recipe(groups, ignore, kv_cache, gptq))
        schemes_of = {
            name: module.quantization_scheme
            for name, module in model.named_modules()
            if getattr(module, "quantization_scheme", None) is not None
        }
        written = Path(temporary) / "written"
        model.save_pretrained(written, save_compressed=True)
        fresh(folder)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(written / name, folder / name)
    _write_ignored(folder, ignore)
    if after is not None:
        after(folder)
    stored = load_file(folder / "model.safetensors")
    activation = _activation(stored, schemes_of)
    record(folder, decompressed(stored, schemes_of), activation=activation, cache=_cache(stored))


def _recipe(groups: Groups, ignore: Sequence[str], kv_cache: bool, gptq: bool) -> Any:
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    config_groups: dict[str, QuantizationScheme] = {}
    for index, (scheme, targets, arguments) in enumerate(groups):
        chosen = preset_name_to_scheme(scheme, list(targets))
        chosen.weights = chosen.weights.model_copy(update=dict(arguments))
        config_groups[f"group_{index}"] = chosen
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    modifier = GPTQModifier if gptq else QuantizationModifier
    return modifier(
        config_groups=config_groups,
        ignore=list(ignore),
        kv_cache_scheme={**cache, "dynamic": False} if kv_cache else None,
    )


def _compress(source: Path, recipe: Any) -> Any:
    from llmcompressor import oneshot

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    rows = [torch.tensor([[(token * (row + 3)) % 64 for token in IDS]]) for row in range(4)]
    batches = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    data: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    return oneshot(model=model, tokenizer=str(source), recipe=recipe, dataset=data)


def decompressed(stored: Tensors, schemes: Schemes) -> Weights:
    """Return what compressed-tensors takes the weights for, computed in float32."""
    return {
        f"{module}.weight": _four_bit_floats(parts, schemes[module])
        if parts.get("weight_packed", parts.get("weight")).dtype == torch.uint8  # type: ignore[union-attr]
        else _others(parts, schemes[module])
        for module, parts in _by_module(stored, schemes)
    }


def _others(parts: Tensors, scheme: Any) -> torch.Tensor:
    """Return a weight [N, K] float32; the library computes in the dtype of the scale."""
    if "weight_g_idx" in parts:
        return _by_group(parts, scheme)
    weight = _compressor(scheme).decompress(
        {**parts, "weight_scale": parts["weight_scale"].float()}, scheme
    )
    return weight["weight"].float()  # type: ignore[no-any-return]


def _by_group(parts: Tensors, scheme: Any) -> torch.Tensor:
    """Return a weight whose inputs have groups of their own: the library no longer knows them, so
    its codes (scales of 1) are multiplied here.
    """
    ones = {**parts, "weight_scale": torch.ones_like(parts["weight_scale"], dtype=torch.float32)}
    codes = _compressor(scheme).decompress(ones, scheme)["weight"]
    return codes * parts["weight_scale"].float()[:, parts["weight_g_idx"].long()]  # type: ignore[no-any-return]


def _four_bit_floats(parts: Tensors, scheme: Any) -> torch.Tensor:
    """Return a weight [N, K] float32; the library's `decompress` rounds it to bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, half = parts["weight_packed"].shape
    codes = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, dtype=torch.float32)
    scale = _compressor(scheme)._decompress_scale(parts["weight_scale"], torch.float32)
    return dequantize(  # type: ignore[no-any-return]
        codes,
        scale.float(),
        args=scheme.weights,
        global_scale=parts.get("weight_global_scale"),
        dtype=torch.float32,
    )


def _compressor(scheme: Any) -> Any:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format

    form = scheme.format or infer_module_format(torch.nn.Linear, scheme)
    return BaseCompressor.get_value_from_registry(getattr(form, "value", form))


def _by_module(stored: Tensors, modules: Iterable[str]) -> Iterable[tuple[str, Tensors]]:
    for module in modules:
        parts = {
            name.removeprefix(f"{module}."): tensor
            for name, tensor in stored.items()
            if name.rpartition(".")[0] == module
        }
        if any(name.startswith("weight_") for name in parts):
            yield module, parts


def _activation(stored: Tensors, schemes: Schemes) -> Activation | None:
    """Return how the library quantises the inputs of linears; None where it does not."""
    from compressed_tensors.quantization import QuantizationStatus
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    if not any(scheme.input_activations for scheme in schemes.values()):
        return None
    holders = {}
    for module, parts in _by_module(stored, schemes):
        kept = {name: part.float() for name, part in parts.items() if name.startswith("input_")}
        holders[module] = SimpleNamespace(quantization_status=QuantizationStatus.FROZEN, **kept)

    def activation(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in holders or not schemes[name].input_activations:
            return x
        inputs = schemes[name].input_activations
        return forward_quantize(holders[name], x, "input", inputs)  # type: ignore[no-any-return]

    return activation


def _cache(stored: Tensors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the scales of keys and values by attention module."""
    modules = [name.removesuffix(".k_scale") for name in stored if name.endswith(".k_scale")]
    return {
        module: (stored[f"{module}.k_scale"].float(), stored[f"{module}.v_scale"].float())
        for module in modules
    }


def _write_ignored(folder: Path, ignore: Sequence[str]) -> None:
    """Write the patterns of `ignore` into the config as releases have them; the library writes the
    modules that they match.
    """
    _edit(folder, lambda settings: settings.update(ignore=list(ignore)))


def write_by_word(folder: Path, **arguments: Any) -> None:
    """Write the same weights packed as releases before 0.18 did: no number runs on in the next word."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    write(folder, **arguments)
    stored = load_file(folder / "model.safetensors")
    groups = _settings(folder)["config_groups"].values()
    for name in [name for name in stored if name.endswith("weight_packed")]:
        module = name.removesuffix(".weight_packed")
        (bits,) = (
            each["weights"]["num_bits"]
            for each in groups
            if any(re.match(target.removeprefix("re:"), module) for target in each["targets"])
        )
        outputs, inputs = stored[f"{module}.weight_shape"].tolist()
        codes = unpack_from_int32(stored[name], bits, (outputs, inputs))
        stored[name] = _words_of(codes, bits)
        if (zero := stored.get(other := f"{module}.weight_zero_point")) is not None:
            zeros = unpack_from_int32(zero, bits, (outputs, zero.shape[1]), packed_dim=0)
            stored[other] = _words_of(zeros.T, bits).T.contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    _edit(folder, lambda settings: settings.update(version="0.13.0"))


def _words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int8 codes [rows, columns] in words, each of `32 // bits` columns."""
    count = 32 // bits
    padded = torch.nn.functional.pad(codes.int() + (1 << bits - 1), (0, -codes.shape[1] % count))
    places = torch.arange(count, dtype=torch.int32) * bits
    words = padded.view(len(codes), -1, count) << places
    return words.sum(-1, dtype=torch.int32)


def shuffled(folder: Path) -> None:
    """Give each input another group, as releases before 2026 could (`weight_g_idx`): another random
    model.
    """
    stored = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in stored if name.endswith("weight_packed")]:
        inputs = stored[name].shape[1] * 8
        order = torch.randperm(inputs, generator=generator)
        stored[name.replace("packed", "g_idx")] = (order // 32).to(torch.int32)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    def change(settings: dict[str, Any]) -> None:
        settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    _edit(folder, change)


def _settings(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config["quantization_config"]  # type: ignore[no-any-return]


def _edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config, indent=2) + "\n")
