"""`gptq`, `awq` and `auto-round`, which writes both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onboard.quantised.layouts.float8 import stems
from onboard.quantised.layouts.integers import Awq, Gptq
from onboard.quantised.methods.auto_round_floats import read_floats
from onboard.quantised.methods.settings import check_keys, group_of, one_of, pattern_of, refusal
from onboard.quantised.weight import NOT_QUANTISED, Files, Method, QuantisedWeight

_GPTQ_KEYS = {
    "quant_method",
    "method",
    "bits",
    "group_size",
    "desc_act",
    "sym",
    "lm_head",
    "damp_percent",
    "damp_auto_increment",
    "static_groups",
    "true_sequential",
    "model_name_or_path",
    "model_file_base_name",
    "is_marlin_format",
    "checkpoint_format",
    "format",
    "meta",
    "pack_dtype",
    "quantizer",
    "tokenizer",
    "dataset",
    "batch_size",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "max_input_length",
    "model_seqlen",
    "module_name_preceding_first_block",
    "block_name_to_quantize",
    "modules_in_block_to_quantize",
    "modules_to_not_convert",
    "pad_token_id",
    "cache_block_outputs",
    "backend",
    "act_group_aware",
    "hessian_chunk_size",
    "provider",
    "v2",
    "v2_alpha",
    "v2_memory_device",
    "mse",
    "fallback",
    "failsafe",
    "failsafe_with_rtn",
    "offload_to_disk",
    "offload_to_disk_path",
    "vram_strategy",
    "gc_mode",
    "auto_forward_data_parallelism",
    "parallel_packing",
    "dynamic",
}
_BITS = range(2, 9)
_LEFT = "-:"
_IN_PLANES = "gptq_p"
"""GPTQModel's format for bits that do not fill words; zeros are as in the second version."""
_OWN_KEYS = {"bits", "group_size", "sym", "desc_act", "mse", "damp_percent", "static_groups"}
_AWQ_KEYS = {
    "quant_method",
    "method",
    "dynamic",
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "zero_point",
    "version",
    "backend",
    "modules_to_not_convert",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "provider",
    "exllama_config",
    "format",
    "desc_act",
    "lm_head",
    "true_sequential",
    "model_file_base_name",
    "model_name_or_path",
    "meta",
    "checkpoint_format",
    "pack_dtype",
}
_AUTO_ROUND_KEYS = {
    "quant_method",
    "bits",
    "group_size",
    "sym",
    "data_type",
    "packing_format",
    "autoround_version",
    "extra_config",
    "block_name_to_quantize",
    "backend",
    "low_gpu_mem_usage",
    "nsamples",
    "seqlen",
    "iters",
    "lr",
    "minmax_lr",
    "batch_size",
    "dataset",
    "amp",
    "enable_quanted_input",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "scale_dtype",
    "act_bits",
    "act_group_size",
    "act_sym",
    "act_dynamic",
    "act_data_type",
    "to_quant_block_names",
    "quant_lm_head",
    "super_bits",
    "super_group_size",
    "supported_types",
    "gradient_accumulate_steps",
    "not_use_best_mse",
    "dynamic_max_gap",
    "sampler",
    "train_bs",
    "fmt",
    "weight_block_size",
    "activation_scheme",
}


@dataclass(frozen=True)
class PackedWords:
    """`qweight` in the layout of GPTQ or AWQ; layers of their own have their own bits and groups."""

    name: str
    layout: Gptq | Awq
    own: Mapping[str, Gptq]
    rules: tuple[tuple[re.Pattern[str], Gptq], ...] = ()
    """Patterns of layers that have their own; the first that matches counts."""
    left: tuple[str, ...] = ()
    """Patterns of layers that are left out, as their tensors show."""

    @property
    def description(self) -> str:
        """In words."""
        bits = self.layout.bits if isinstance(self.layout, Gptq) else 4
        group = f", groups of {self.layout.group}" if self.layout.group else ""
        return f"{self.name}, {bits} bits{group}"

    def layout_of(self, module: str) -> Gptq | Awq | None:
        """Return how a layer lies in the files; None: it is left out, or no op has its bits."""
        layout = self._layout_of(module)
        left = any(pattern_of(self.name, text).match(module) for text in self.left)
        return None if left or layout.bits not in (4, 8) else layout

    def _layout_of(self, module: str) -> Gptq | Awq:
        ruled = (layout for pattern, layout in self.rules if pattern.match(module))
        return self.own.get(module) or next(ruled, self.layout)

    def weights(self, files: Files) -> dict[str, QuantisedWeight]:
        """Return the quantised weights by name."""
        tensors, found = files.names(), {}
        for stem in stems(tensors, ".qweight"):
            weight = self._layout_of(stem).find(tensors, f"{stem}.weight", NOT_QUANTISED)
            assert weight is not None, f"{stem}.qweight is there"
            found[weight.name] = weight
        return found


def read_gptq(values: Mapping[str, Any]) -> PackedWords:
    """Read GPTQ's `quantization_config`, or quantize_config.json."""
    check_keys("gptq", values, _GPTQ_KEYS | _AUTO_ROUND_KEYS)
    bits = one_of("gptq", values, "bits", _BITS)
    written = values.get("checkpoint_format") or values.get("format") or "gptq"
    if values.get("is_marlin_format") or written not in ("gptq", "gptq_v2", _IN_PLANES):
        raise refusal(
            "gptq", f"the format {'marlin' if values.get('is_marlin_format') else written}"
        )
    general = Gptq(
        bits,
        group_of("gptq", values),
        zero_is_less=written == "gptq",
        has_order=values.get("desc_act") is True,
        in_planes=written == _IN_PLANES,
    )
    return PackedWords("gptq", general, {}, tuple(_rules(values, general)), _left(values))


def _left(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns of layers that are not quantised."""
    rules = map(str, _dynamic(values))
    return tuple(rule.removeprefix(_LEFT) for rule in rules if rule.startswith(_LEFT))


def _dynamic(values: Mapping[str, Any]) -> Mapping[str, Any]:
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise refusal("gptq", f"dynamic = {str(dynamic)[:60]}")
    return dynamic


def _rules(values: Mapping[str, Any], general: Gptq) -> Iterator[tuple[re.Pattern[str], Gptq]]:
    """Yield the patterns of GPTQModel's `dynamic` that give layers bits and groups of their own; those
    after "-:" name layers that are not quantised.
    """
    for rule, own in _dynamic(values).items():
        if str(rule).startswith(_LEFT):
            continue
        if not isinstance(own, Mapping):
            raise refusal("gptq", f"dynamic of {str(rule)[:60]}")
        check_keys("gptq", own, _OWN_KEYS)
        said = {"bits": values["bits"], "group_size": values["group_size"], **own}
        bits = one_of("gptq", said, "bits", _BITS)
        pattern = pattern_of("gptq", str(rule).removeprefix("+:"))
        ordered = {"desc_act": values.get("desc_act"), **own}["desc_act"] is True
        group = group_of("gptq", said)
        yield pattern, replace(general, bits=bits, group=group, has_order=ordered)


def read_awq(values: Mapping[str, Any]) -> PackedWords:
    """Read AWQ's `quantization_config`, or quant_config.json."""
    check_keys("awq", values, _AWQ_KEYS | _AUTO_ROUND_KEYS)
    said = {
        "bits": values.get("bits", values.get("w_bit")),
        "version": str(values.get("version", "gemm")).lower(),
        "group_size": values.get("group_size", values.get("q_group_size")),
    }
    one_of("awq", said, "bits", (4,))
    one_of("awq", said, "version", ("gemm",))
    for key in ("format", "checkpoint_format"):
        one_of("awq", {key: None} | dict(values), key, (None, "gemm", "awq"))
    layout = Awq(group_of("awq", said), bool(values.get("zero_point", True)))
    if len(left := _left(values)) < len(_dynamic(values)):
        raise refusal("awq", "layers that have settings of their own (dynamic)")
    return PackedWords("awq", layout, {}, left=left)


def read_auto_round(values: Mapping[str, Any]) -> Method:
    """Read auto-round's `quantization_config`: GPTQ's layout or AWQ's, layer by layer, or floats."""
    name = "auto-round"
    check_keys(name, values, _AUTO_ROUND_KEYS)
    if (floats := read_floats(values)) is not None:
        return floats
    one_of(name, {"data_type": "int"} | dict(values), "data_type", ("int",))
    one_of(name, {"act_bits": 16} | dict(values), "act_bits", (16, 32, None))
    packing = str(values.get("packing_format", ""))
    bits = one_of(name, values, "bits", _BITS)
    if packing.endswith(("auto_awq", ":awq")):
        return PackedWords(name, Awq(group_of(name, values)), {})
    if packing != "auto_round" and not packing.endswith(("auto_gptq", "gptqmodel")):
        raise refusal(name, f"packing_format = {packing[:60]}")
    less = packing.endswith("auto_gptq")
    general = _of_auto_round(bits, group_of(name, values), less)
    layers = dict(_own_layers(values, less))
    own = {layer: layout for layer, layout in layers.items() if layout and not _is_pattern(layer)}
    rules = {layer: layout for layer, layout in layers.items() if layout and _is_pattern(layer)}
    patterns = tuple((_pattern_within(name, text), layout) for text, layout in rules.items())
    left = (layer for layer, layout in layers.items() if layout is None)
    texts = (text if _is_pattern(text) else f"{re.escape(text)}$" for text in left)
    return PackedWords(name, general, own, patterns, tuple(texts))


def _is_pattern(layer: str) -> bool:
    """Tell whether a key means layers by a pattern; a name has letters, digits and dots."""
    return re.fullmatch(r"[\w.]*", layer) is None


def _pattern_within(method: str, text: str) -> re.Pattern[str]:
    """Return a pattern that is looked for anywhere in a name."""
    return pattern_of(method, text if text.startswith((".*", "^")) else f".*(?:{text})")


def _own_layers(values: Mapping[str, Any], less: bool) -> Iterator[tuple[str, Gptq | None]]:
    """Yield layers, or patterns of them, and what they have of their own; None: they are left out."""
    extra = values.get("extra_config") or {}
    if not isinstance(extra, Mapping):
        raise refusal("auto-round", f"extra_config = {str(extra)[:60]}")
    for layer, own in extra.items():
        if not isinstance(own, Mapping):
            raise refusal("auto-round", f"extra_config of {str(layer)[:60]}")
        said = {"bits": values["bits"], "group_size": values["group_size"], **own}
        has_codes = said["bits"] in _BITS
        group = group_of("auto-round", said) if has_codes else None
        yield str(layer), _of_auto_round(said["bits"], group, less) if has_codes else None


def _of_auto_round(bits: int, group: int | None, less: bool) -> Gptq:
    return Gptq(bits, group, less, stores_order=False)
