"""Config, Hugging Face source and module tree -> `ModelSpec`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis import repository
from onboard.analysis.behaviour.apart import check_batch, check_causality
from onboard.analysis.behaviour.cache_probe import cache_notes
from onboard.analysis.behaviour.positions import first_position
from onboard.analysis.behaviour.repeated import repeated_tokens
from onboard.analysis.behaviour.texts import check_rows
from onboard.analysis.layer_modules import mark_mixtures, with_modules
from onboard.analysis.mixture_traits import active_parameters
from onboard.analysis.multimodal import is_under, unused_parts
from onboard.analysis.recognise import mixers, probe
from onboard.analysis.recognise import scan_loops as loops
from onboard.analysis.recognise.block_indexers import probe_block_indexer
from onboard.analysis.recognise.compressors import check_keys_beside, probe_compressor
from onboard.analysis.recognise.experts import probe_experts
from onboard.analysis.recognise.mask_makers import mask_makers
from onboard.analysis.recognise.position_biases import position_bias
from onboard.analysis.recognise.recorder import ModuleCall, Recording, record
from onboard.analysis.recognise.scan_modules import probe_scan_module
from onboard.analysis.recognise.uncalled import with_uncalled
from onboard.analysis.repository_source import survey_code
from onboard.analysis.source import location, module_source, sources_hash, sources_of
from onboard.analysis.spec import LayerKind, ModelSpec, RepositoryCode, Trait
from onboard.analysis.spec_blocks import Block, make_block
from onboard.analysis.tiny.tiny_mixers import indexer_sizes
from onboard.analysis.tiny.tiny_model import (
    begins_at_zero,
    build_tiny,
    counts_positions,
    layer_kind_names,
    load_config,
    one_line,
    prompts,
)
from onboard.analysis.traits import traits
from onboard.errors import OnboardError
from onboard.hf.architecture import text_config
from onboard.hf.codebooks import codebooks_of, places_of
from onboard.hf.expert_weights import separate_experts
from onboard.hf.hf_model import build_reference, missing_towers
from onboard.ops.sparse.indexer import tie_note
from onboard.verify.error import rmse_ratio
from onboard.verify.limits import SAME

_COUNTED = Trait(value="counted", evidence="probe: position_ids do not change the logits")
_FROM_ZERO = Trait(
    value="from zero", evidence="probe: at other positions a token changes logits before it"
)


def analyze(
    config: Mapping[str, Any],
    config_dir: Path | None = None,
    *,
    model: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """Find out what a checkpoint's architecture is made of.

    Args:
        config: parsed config.json.
        config_dir: its folder (code of the repository would lie there).
        model: id or path, for the report.
        revision: resolved commit.
        trust_remote_code: the user allows code from the repository to run.

    Raises:
        ConsentRequiredError: the model needs code from its repository.
        OnboardError: not a causal language model of transformers, or one whose attention has no
            canonical form.
    """
    full = load_config(config, trust_remote_code=trust_remote_code)
    tiny = build_tiny(full)
    check_rows(tiny)
    try:
        recordings = _record(tiny)
        notes = cache_notes(tiny)
    except OnboardError:
        raise
    except Exception as error:
        raise OnboardError(
            f"a small {full.model_type} model does not run: {one_line(error)}"
        ) from error
    try:
        spec = _spec(config, full, tiny, recordings, model, revision)
    except OnboardError:
        raise
    except Exception as error:
        raise OnboardError(f"{full.model_type} cannot be analysed: {one_line(error)}") from error
    spec.tricky.extend([*notes, *_left_out(tiny)])
    spec.repository = _repository(config, config_dir, full)
    return spec


def _left_out(model: nn.Module) -> list[str]:
    """Note the towers that nothing could be found out about."""
    missing = missing_towers(model)
    return [
        f"{path} needs {' and '.join(packages)}: text alone was looked at"
        for path, packages in missing.items()
    ]


def _repository(
    config: Mapping[str, Any], folder: Path | None, full: PretrainedConfig
) -> RepositoryCode | None:
    """Return what there is to say of the model's own code; None when transformers has its code."""
    facts = repository.facts_of(full.model_type)
    if facts is None or folder is None:
        return None
    survey = survey_code(folder, config)
    names = ("num_hidden_layers", "max_position_embeddings")
    native = {name: value for name in names if isinstance(value := getattr(full, name, None), int)}
    return RepositoryCode(classes=survey.classes, files=survey.files, facts=facts, native=native)


def _spec(
    config: Mapping[str, Any],
    full: PretrainedConfig,
    tiny: nn.Module,
    recordings: list[Recording],
    model: str,
    revision: str | None,
) -> ModelSpec:
    eager = unused_parts(tiny, recordings[0].modules.keys())
    sources = sources_of(tiny, eager)
    blocks = [
        *_module_blocks(tiny, recordings[0], eager),
        *_rope_blocks(recordings),
        *_scan_blocks(recordings[0]),
    ]
    blocks += loops.loop_blocks(recordings, sources[0].path.name)
    check_keys_beside(tiny, recordings, blocks)
    if not recordings[0].attention:
        blocks += _mask_blocks(tiny)
    whole = _without_memory(full)
    kinds = _layer_kinds(
        whole, tiny, recordings[0], {b.class_name for b in blocks if b.kind == "experts"}, eager
    )
    found = traits(text_config(full), tiny, recordings[0], blocks)
    return ModelSpec(
        model=model,
        revision=revision,
        family=full.model_type,
        architecture=type(tiny).__name__,
        config_class=type(full).__name__,
        hf_module=type(tiny).__module__,
        transformers_version=transformers.__version__,
        source_hash=sources_hash(sources),
        sources=[source.path.name for source in sources],
        num_parameters=_parameters(whole),
        active_parameters=active_parameters(whole, blocks, found),
        config=dict(config),
        traits=found
        | position_bias(recordings[0])
        | _codebooks(tiny)
        | _positions(full, tiny)
        | _repeated(tiny, recordings[0]),
        blocks=blocks,
        layer_kinds=[with_modules(kind, tiny, recordings[0], blocks) for kind in kinds],
        eager=eager,
        never_called=_never_called(tiny, recordings),
        tricky=_tricky(text_config(full), recordings[0]),
    )


def _codebooks(tiny: nn.Module) -> dict[str, Trait]:
    places, count = places_of(tiny), codebooks_of(tiny).count
    if places is None:
        return {}
    return {
        "codebooks": Trait(
            value=count, evidence=f"module tree: {' and '.join(places)} have {count} modules each"
        )
    }


def _positions(config: PretrainedConfig, tiny: nn.Module) -> dict[str, Trait]:
    if counts_positions(tiny):
        return {"positions": _COUNTED}
    if begins_at_zero(tiny):
        return {"positions": _FROM_ZERO}
    first = first_position(config)
    return {"first_position": first} if first is not None else {}


def _repeated(tiny: nn.Module, recording: Recording) -> dict[str, Trait]:
    found = repeated_tokens(tiny) if recording.attention else None
    return {} if found is None else {"repeated_tokens": found}


def _without_memory(config: PretrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build_reference(config)
    return model


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())


def _record(model: nn.Module) -> list[Recording]:
    """Run the prompts with canonical attention; the logits must be the model's own."""
    recordings = []
    for inputs in prompts(model):
        with torch.no_grad():
            expected = model(**inputs, use_cache=False).logits
        recording = record(model, inputs)
        error = rmse_ratio(recording.logits, expected)
        odd = [call.path for call in recording.attention if not call.mask_is_causal]
        if odd:
            raise OnboardError(
                f"the mask of {odd[0]} is not causal with the layer's sliding window"
            )
        if not error <= SAME:
            raise OnboardError(
                f"canonical attention changes the logits of {type(model).__name__} (rmse ratio {error:.1e})"
            )
        recordings.append(recording)
    check_batch(model)
    check_causality(model)  # by a batch
    return recordings


def _module_blocks(model: nn.Module, recording: Recording, eager: list[str]) -> list[Block]:
    """Return a block for each class of the module tree that is not PyTorch's, in the order of the
    tree.
    """
    blocks: dict[str, Block] = {}
    attention = {call.path for call in recording.attention}
    separate = separate_experts(model)
    for cls, (path, module) in _examples(model, recording, eager).items():
        finding = _classify(model, path, module, recording, attention, separate)
        blocks[cls.__name__] = make_block(
            class_name=cls.__name__,
            kind=finding.kind,
            path=path,
            source=location(cls),
            parameters=finding.parameters,
            evidence=finding.evidence,
        )
    return list(blocks.values())


def _never_called(model: nn.Module, recordings: list[Recording]) -> list[str]:
    """Return the paths of modules, other than PyTorch's, that ran in no recording."""
    own = [
        path
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
    ]
    return [path for path in own if all(path not in recording.modules for recording in recordings)]


def _examples(
    model: nn.Module, recording: Recording, eager: list[str]
) -> dict[type, tuple[str, nn.Module]]:
    """Return path and module of the first example of each class in the tree, the first one that
    runs if one does.
    """
    found: dict[type, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        cls = type(module)
        if cls.__module__.startswith("torch.") or cls.__module__ == "transformers.activations":
            continue
        if is_under(path, eager):
            continue
        if cls not in found or (
            found[cls][0] not in recording.modules and path in recording.modules
        ):
            found[cls] = path, module
    return found


def _classify(
    model: nn.Module,
    path: str,
    module: nn.Module,
    recording: Recording,
    attention: set[str],
    separate: dict[str, torch.Tensor],
) -> probe.Finding:
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
    if (found := probe_block_indexer(module, calls)) is not None:
        return found
    if (found := probe_compressor(module, path, recording.modules)) is not None:
        return found
    if (
        gated := mixers.probe_gated_norm(module)
    ) is not None:  # first: without a gate it is a plain norm
        return gated
    same_class = [item for item in model.modules() if type(item) is type(module)]
    norms = [probe.probe_norm(item) for item in same_class]
    weightless = {
        norm is not None and "weightless" in norm.parameters for norm in norms
    }  # a class may be both
    if all(norm is not None for norm in norms) and len(weightless) == 1:
        found = next((n for n in norms if n is not None and n.parameters.get("per_head")), norms[0])
        assert found is not None
        if found.kind == "layernorm" and _made_with_tuple(type(module)):
            found.parameters["per_head"] = True
        return found
    if (found := probe.probe_mlp(module, text_config(model.config))) is not None:
        return found
    if isinstance(module, nn.Embedding):
        return probe.Finding("embedding")
    if any(name.startswith(f"{path}.") for name in attention):
        return probe.Finding("decoder_layer" if re.search(r"\.\d+(\.|$)", path) else "model")
    return probe.Finding("other")


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
        if (finding := probe.probe_rope(call))
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
        "own_sizes": getattr(
            config, "is_heterogeneous", False
        ),  # heads of a layer type may have a size of their own
    }
    return {name: True for name, is_so in unusual.items() if is_so}


def _rope_blocks(recordings: list[Recording]) -> list[Block]:
    """Return a block for each helper function that applies RoPE; its evidence is the worst of all
    calls.
    """
    blocks: dict[str, Block] = {}
    for call in with_uncalled(
        [call for each in recordings for call in each.functions], probe.probe_rope
    ):
        finding = probe.probe_rope(call)
        source = module_source(call.module)
        node = source.functions.get(call.name)
        if finding is None or node is None or call.name in blocks:
            continue
        blocks[call.name] = make_block(
            class_name=call.name,
            kind="rope",
            path="",
            source=source.location(node),
            parameters=finding.parameters | ({} if call.called else {"uncalled": True}),
            evidence=finding.evidence,
        )
    return list(blocks.values())


def _scan_blocks(recording: Recording) -> list[Block]:
    """Return a block for each helper function that is a canonical op of recurrent mixers."""
    blocks: dict[str, Block] = {}
    for call in recording.helpers:
        source = module_source(call.function.__module__)
        node = source.functions.get(call.name)
        if node is None or call.name in blocks or (finding := mixers.probe_scan(call)) is None:
            continue
        blocks[call.name] = make_block(
            class_name=call.name,
            kind=finding.kind,
            path="",
            source=source.location(node),
            parameters=finding.parameters,
            evidence=finding.evidence,
        )
    return list(blocks.values())


def _mask_blocks(model: nn.Module) -> list[Block]:
    """Return a block for each function or method that makes the causal mask of attention that is
    written out.
    """
    evidence = ["probe: returns a causal mask whenever it is called"]
    source = location(type(model)).split(":")[0]
    return [
        make_block(
            class_name=item,
            kind="mask",
            path="",
            source=source,
            parameters={"returns": kinds},
            evidence=evidence,
        )
        for item, kinds in mask_makers(model).items()
    ]


def _layer_kinds(
    whole: nn.Module, tiny: nn.Module, recording: Recording, experts: set[str], eager: list[str]
) -> list[LayerKind]:
    """Group the checkpoint's decoder layers by kind; a path is that of the tiny model's first one
    that runs, if any.

    A window that all layers have is no field of theirs: the probe tells. Which layers are mixtures,
    where not all are, their modules tell: `experts` are the classes to look for.
    """
    windows = {call.window for call in recording.attention}
    names, small = (layer_kind_names(model.config) for model in (whole, tiny))
    if set(names) == {"full_attention"} and windows and None not in windows:
        names, small = (["sliding_attention"] * len(item) for item in (names, small))
    modules = [item for item in tiny.named_modules() if not is_under(item[0], eager)]
    lists = {path: module for path, module in modules if isinstance(module, nn.ModuleList)}
    path = max(lists, key=lambda item: len(list(lists[item].modules())), default="layers")
    names, small = (mark_mixtures(*pair, path, experts) for pair in ((names, whole), (small, tiny)))
    kinds: dict[str, LayerKind] = {}
    for index, name in enumerate(names):
        if name not in small:
            raise OnboardError(
                f"the small model has no layer of the kind {name}", hint="Report this config"
            )
        paths = [f"{path}.{place}" for place, other in enumerate(small) if other == name]
        ran = next((each for each in paths if each in recording.modules), paths[0])
        kinds.setdefault(name, LayerKind(name=name, layers=[], path=ran)).layers.append(index)
    return list(kinds.values())


def _tricky(config: PretrainedConfig, recording: Recording) -> list[str]:
    notes = []
    if any(call.window is not None for call in recording.attention):
        notes.append("sliding windows: test with prompts longer than the window")
    if "longrope" in str(getattr(config, "rope_parameters", None)):
        notes.append(
            "longrope: frequencies switch for the whole batch when one position passes the original context"
        )
    if (sizes := indexer_sizes(config)) and (note := tie_note(*sizes)):
        notes.append(note)
    return notes
