"""What a module of the tree is: the kind of its block, its parameters, the evidence."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import nn

from onboard.analysis.recognise import mixers, probe
from onboard.analysis.recognise.block_indexers import probe_block_indexer
from onboard.analysis.recognise.compressors import probe_compressor
from onboard.analysis.recognise.experts import probe_experts
from onboard.analysis.recognise.mixtures import probe_mixture
from onboard.analysis.recognise.recorder import ModuleCall, Recording
from onboard.analysis.recognise.scans.scan_modules import probe_scan_module
from onboard.analysis.source import module_source
from onboard.hf.architecture import text_config


def classify(
    model: nn.Module,
    path: str,
    module: nn.Module,
    recording: Recording,
    attention: set[str],
    separate: dict[str, torch.Tensor],
) -> probe.Finding:
    """Return what a module is, by what it computes and where it lies; "other" where that is
    nothing known.

    Args:
        model: the tiny model.
        path: where the module lies in it.
        module: the module.
        recording: what ran, with what.
        attention: paths of the modules that call the attention interface.
        separate: the model's weights, by name, those of experts apart.
    """
    calls = recording.modules.get(path, [])
    if module is model:
        return probe.Finding("causal_lm")
    if (found := probe_scan_module(module, calls)) is not None:
        return found
    if path in attention:
        return _attention(module)
    if calls and all(probe.probe_rotary(call.output) for call in calls):
        finding = _rotary(model, module, recording, calls[0].output)
        return finding if finding.kind == "other" else _with_axes(finding, calls[0])
    if calls and (found := probe_experts(module, calls[0], _under(path, separate))) is not None:
        return found
    if (found := probe_mixture(module, calls)) is not None:
        return found
    if (found := probe_block_indexer(module, calls)) is not None:
        return found
    if (found := probe_compressor(module, path, recording.modules)) is not None:
        return found
    # First: without a gate it is a plain norm.
    if (found := mixers.probe_gated_norm(module)) is not None:
        return found
    if (found := _norm(model, module, recording)) is not None:
        return found
    if (found := probe.probe_mlp(module, text_config(model.config))) is not None:
        return found
    return probe.Finding(_kind_by_place(path, module, attention))


def _norm(model: nn.Module, module: nn.Module, recording: Recording) -> probe.Finding | None:
    """Return the finding for a class of norms; None where not all of its modules are of one kind,
    with or without a weight, or one gives more, as the sum of which it is the norm.
    """
    named = {path: item for path, item in model.named_modules() if type(item) is type(module)}
    if any(
        isinstance(call.output, tuple) for path in named for call in recording.modules.get(path, [])
    ):
        return None
    same_class = [*named.values()]
    norms = [norm for item in same_class if (norm := probe.probe_norm(item)) is not None]
    weightless = {"weightless" in norm.parameters for norm in norms}
    if len(norms) != len(same_class) or len(weightless) != 1:
        return None
    found = next((norm for norm in norms if norm.parameters.get("per_head")), norms[0])
    if found.kind == "layernorm" and _made_with_tuple(type(module)):
        found.parameters["per_head"] = True
    return found


def _kind_by_place(path: str, module: nn.Module, attention: set[str]) -> str:
    """Return the kind of a module that computes nothing known: what it holds tells."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    if any(name.startswith(f"{path}.") for name in attention):
        return "decoder_layer" if re.search(r"\.\d+(\.|$)", path) else "model"
    return "other"


def _with_axes(finding: probe.Finding, call: ModuleCall) -> probe.Finding:
    """Note whether a rotary embedding gets positions of several axes, [axes, batch, seq]."""
    tensors = [
        item for item in (*call.args, *call.kwargs.values()) if isinstance(item, torch.Tensor)
    ]
    axes = any(item.dtype == torch.int64 and item.dim() == 3 for item in tensors)
    finding.parameters["axes"] = axes
    return finding


def _attention(module: nn.Module) -> probe.Finding:
    latent = mixers.probe_latent_attention(module)
    expands = (
        [f"probe: {latent['expand']} expands latents by {latent['kv_b_proj']}"] if latent else []
    )
    return probe.Finding(
        "attention", dict(latent), ["probe: calls the attention interface", *expands]
    )


def _under(path: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights under a module path, named relative to it."""
    prefix = f"{path}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def _made_with_tuple(cls: type) -> bool:
    """Whether some config gives a norm's weight several dimensions (a weight for each head)."""
    calls = [
        node for node in ast.walk(module_source(cls.__module__).tree) if isinstance(node, ast.Call)
    ]
    own = [
        node for node in calls if isinstance(node.func, ast.Name) and node.func.id == cls.__name__
    ]
    arguments = [
        argument
        for node in own
        for argument in (*node.args, *(item.value for item in node.keywords))
    ]
    return any(isinstance(argument, ast.Tuple) for argument in arguments)


def _rotary(
    model: nn.Module, module: nn.Module, recording: Recording, output: Any
) -> probe.Finding:
    """Return the finding for a rotary embedding whose tables the template can build; others are
    translated.
    """
    config: Any = text_config(model.config)
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not hasattr(
        type(module), "compute_default_rope_parameters"
    ):
        return probe.Finding("other")
    if not hasattr(config, "max_position_embeddings"):  # how long a table would have to be
        return probe.Finding("other")
    per_layer_type = "rope_type" not in parameters
    ropes = {
        finding.parameters["op"]
        for call in recording.functions
        if (finding := probe.probe_rope(call)) and not finding.parameters.get("single")
    }
    complex_form = ropes == {"torch_rope_with_complex_freqs"}
    longrope = "longrope" in str(parameters) or hasattr(config, "original_max_position_embeddings")
    scale = probe.scale_of(output)
    whole = isinstance(output, torch.Tensor)
    style = (
        "complex"
        if complex_form or whole
        else "cos_sin"
        if probe.is_doubled(output)
        else "half_cos_sin"
    )
    return probe.Finding(
        "rotary",
        {"style": style, "per_layer_type": per_layer_type, "longrope": longrope}
        | _of_layer_types(config),
        [f"probe: cos^2 + sin^2 = {scale:.6g}^2 everywhere", "config.json: rope_parameters"],
    )


def _of_layer_types(config: Any) -> dict[str, bool]:
    """Return what is unusual about the RoPE of single layer types."""
    rope = config.rope_parameters
    if "rope_type" in rope:
        return {}
    if not set(config.layer_types) & rope.keys():
        return {"own_kinds": True}  # which modules name themselves
    unusual = {
        "some_types": bool(set(config.layer_types) - rope.keys()),
        "partly": None in rope.values(),
        # heads of a layer type may have a size of their own
        "own_sizes": getattr(config, "is_heterogeneous", False),
    }
    return {name: True for name, is_so in unusual.items() if is_so}
