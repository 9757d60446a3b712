"""Config, Hugging Face source and module tree -> `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis import repository
from onboard.analysis.behaviour.apart import (
    check_attention,
    check_batch,
    check_causality,
    check_mask,
    check_repeats,
    looks_ahead,
    runs_fresh,
)
from onboard.analysis.behaviour.cache_probe import cache_notes
from onboard.analysis.behaviour.idle import is_idle
from onboard.analysis.behaviour.positions import first_position
from onboard.analysis.behaviour.repeated import repeated_tokens
from onboard.analysis.behaviour.rounding import check_rounding
from onboard.analysis.behaviour.texts import check_ends, check_lengths, check_pieces, check_rows
from onboard.analysis.behaviour.thresholds import build_roomy
from onboard.analysis.block_findings import mask_blocks, module_blocks, rope_blocks, scan_blocks
from onboard.analysis.layer_modules import layer_kinds, with_modules
from onboard.analysis.mixture_traits import active_parameters
from onboard.analysis.multimodal import unused_parts
from onboard.analysis.recognise.compressors import check_keys_beside
from onboard.analysis.recognise.position_biases import position_bias
from onboard.analysis.recognise.recorder import Recording, record
from onboard.analysis.recognise.scans import scan_loops as loops
from onboard.analysis.recognise.scans.chunked_scans import stretch_blocks
from onboard.analysis.repository_source import survey_code
from onboard.analysis.source import sources_hash, sources_of
from onboard.analysis.spec import ModelSpec, RepositoryCode, Trait
from onboard.analysis.spec_blocks import MIXTURES
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import one_line, tiny_config
from onboard.analysis.tiny.tiny_mixers import indexer_sizes
from onboard.analysis.tiny.tiny_model import build_small, build_tiny
from onboard.analysis.tiny.tiny_prompts import (
    begins_at_zero,
    counts_positions,
    positions_below_length,
    prompts,
    vocabulary,
)
from onboard.analysis.traits import traits
from onboard.errors import EagerDiffersError, OnboardError
from onboard.hf.architecture import text_config
from onboard.hf.codebooks import codebooks_of, places_of
from onboard.hf.hf_model import build_reference, missing_towers
from onboard.hf.parameters_on import without_memory
from onboard.ops.sparse.indexer import tie_note
from onboard.verify.error import rmse_ratio
from onboard.verify.tolerances import SAME

_COUNTED = Trait(value="counted", evidence="probe: position_ids do not change the logits")
_FROM_ZERO = Trait(
    value="from zero", evidence="probe: at other positions a token changes logits before it"
)

_BELOW_LENGTH = Trait(
    value="from zero", evidence="probe: positions as large as the text's length fail"
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
    try:
        check_rows(tiny)
        if repository.is_installed(full.model_type):
            _check_own_code(full, tiny)
        recordings = _record(tiny)
        notes = cache_notes(build_roomy(full))
    except OnboardError:
        raise
    except Exception as error:
        raise _failure(full, tiny, error) from error
    try:
        code = _repository(config, config_dir, full)
        spec = _spec(config, full, tiny, recordings, model, revision, code)
    except OnboardError:
        raise
    except Exception as error:
        raise OnboardError(f"{full.model_type} cannot be analysed: {one_line(error)}") from error
    spec.tricky.extend([*notes, *_left_out(tiny)])
    return spec


def _check_own_code(full: PretrainedConfig, tiny: nn.Module) -> None:
    """Refuse what a repository's code may do with texts that transformers' own does not."""
    repository.note_outputs(type(tiny))
    check_ends(tiny)
    check_repeats(partial(_made_anew, full), vocabulary(tiny))
    check_rounding(tiny)
    check_pieces(tiny)
    check_lengths(tiny)
    check_mask(tiny)
    chosen = getattr(full, "_attn_implementation", None)
    if chosen == "eager":
        return
    _check_attention(full, tiny, chosen)


def _check_attention(full: PretrainedConfig, tiny: nn.Module, chosen: str | None) -> None:
    usual = partial(build_small, tiny_config(full), attention=chosen)
    check_attention(tiny, usual, _within_windows(full, tiny.config))


def check_eager(config: Mapping[str, Any]) -> None:
    """Raise `EagerDiffersError` for a class of transformers whose eager attention, which model files
    are translated from and compared with, computes something else than the one that users get.
    """
    full = load_config(config)
    try:
        _check_attention(full, build_tiny(full), None)
    except EagerDiffersError as error:
        no_mode = "No mode runs it: eager attention is what all of them are compared with"
        raise EagerDiffersError(error.message, hint=no_mode) from error
    except OnboardError:
        return  # why it has no translation says more


def _within_windows(full: PretrainedConfig, small: Any, longest: int = 40) -> int:
    """Return the length of a text for a small model that no window cuts that cuts none of the whole
    model's, by its config.
    """
    window, limit, cut = (
        getattr(config, name, None)
        for config, name in (
            (full, "sliding_window"),
            (full, "max_position_embeddings"),
            (small, "sliding_window"),
        )
    )
    if isinstance(window, int) and isinstance(limit, int) and isinstance(cut, int):
        return min(cut, longest) if window >= limit else longest
    return longest


def _made_anew(full: PretrainedConfig) -> nn.Module:
    """Return a small model with a config of its own: constructors may change it."""
    return build_small(tiny_config(full))


def _failure(full: PretrainedConfig, tiny: nn.Module, error: Exception) -> OnboardError:
    """Return what to say of a small model that fails on some text, or with a mask: of one that runs
    without, and looks ahead, that.
    """
    fresh, said = partial(_made_anew, full), one_line(error)
    if not repository.is_installed(full.model_type):
        return OnboardError(f"a small {full.model_type} model does not run: {said}")
    if runs_fresh(fresh, vocabulary(fresh())):
        return OnboardError(
            f"the model's own code keeps what it computed of a text, and fails on the next one: {said}"
        )
    return looks_ahead(tiny) or OnboardError(
        f"a small {full.model_type} model does not run: {said}"
    )


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
    code: RepositoryCode | None,
) -> ModelSpec:
    eager = unused_parts(tiny, recordings[0].modules.keys())
    sources = sources_of(tiny, eager)
    blocks = [
        *module_blocks(tiny, recordings[0], eager),
        *rope_blocks(recordings),
        *scan_blocks(recordings[0]),
    ]
    blocks += loops.loop_blocks(recordings, sources[0].path.name)
    blocks += stretch_blocks(recordings, sources[0].path.name)
    check_keys_beside(tiny, recordings, blocks)
    if not recordings[0].attention or repository.is_installed(full.model_type):
        blocks += mask_blocks(tiny)  # that transformers' own functions make is known
    whole = _without_memory(full, tiny)
    kinds = layer_kinds(
        whole, tiny, recordings[0], {b.class_name for b in blocks if b.kind in MIXTURES}, eager
    )
    found = traits(full, tiny, recordings[0], blocks)
    return ModelSpec(
        model=model,
        revision=revision,
        family=full.model_type,
        architecture=type(tiny).__name__,
        config_class=type(full).__name__,
        hf_module=type(tiny).__module__,
        repository=code,
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
    if positions_below_length(tiny):
        return {"positions": _BELOW_LENGTH}
    if begins_at_zero(tiny):
        return {"positions": _FROM_ZERO}
    first = first_position(config)
    return {"first_position": first} if first is not None else {}


def _repeated(tiny: nn.Module, recording: Recording) -> dict[str, Trait]:
    found = repeated_tokens(tiny) if recording.attention else None
    return {} if found is None else {"repeated_tokens": found}


def _without_memory(config: PretrainedConfig, tiny: Any) -> nn.Module:
    """Return the whole model, its attention of the small one's classes."""
    attention = tiny.config._attn_implementation
    with without_memory(computing=repository.is_installed(config.model_type)):
        return build_reference(deepcopy(config), attn_implementation=attention)  # type: ignore[no-any-return]


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())


def _record(model: nn.Module) -> list[Recording]:
    """Run the prompts with canonical attention; the logits must be the model's own."""
    recordings = []
    for inputs in prompts(model):
        with torch.no_grad():
            expected = model(**inputs, use_cache=False).logits
        if not expected.isfinite().all():
            raise OnboardError(
                f"the logits of transformers' own {type(model).__name__} are not finite, with the numbers"
                " of this config and small random weights",
                hint="Compare config.json with that of the released model",
            )
        recording = record(model, inputs)
        error = rmse_ratio(recording.logits, expected)
        odd = {call.path for call in recording.attention if not call.mask_is_causal}
        idle = {path for path in odd if is_idle(model, path, inputs)}
        if wrong := odd - idle:
            raise OnboardError(
                f"the mask of {min(wrong)} is not causal with the layer's sliding window"
            )
        recording.attention = [call for call in recording.attention if call.path not in idle]
        if not error <= SAME:
            raise OnboardError(
                f"canonical attention changes the logits of {type(model).__name__} (rmse ratio {error:.1e})"
            )
        recordings.append(recording)
    check_batch(model)
    check_causality(model)  # by a batch
    return recordings


def _never_called(model: nn.Module, recordings: list[Recording]) -> list[str]:
    """Return the paths of modules, other than PyTorch's, that ran in no recording."""
    own = [
        path
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
    ]
    return [path for path in own if all(path not in recording.modules for recording in recordings)]


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
