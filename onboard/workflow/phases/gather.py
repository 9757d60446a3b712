"""gather: fetch config, code and tokenizer, and refuse what cannot be onboarded before anything is
written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from onboard.analysis.repository_source import CodeSurvey, survey_code
from onboard.errors import ConsentRequiredError, OnboardError, UsageError
from onboard.gpu import device_memory, gigabytes
from onboard.hub import OWN_CODE, has_weights, known_type
from onboard.sources.language_part import part_of
from onboard.untrusted.bounds import FILES
from onboard.workflow.checkpoint.own_sizes import check_own_sizes
from onboard.workflow.checkpoint.parameter_count import (
    ModelSize,
    build_on_meta,
    estimate_size,
    module_counts,
)
from onboard.workflow.checkpoint.usable_weights import check_fit, check_weights, stored_tensors
from onboard.workflow.checkpoint.vocabulary import check_vocabulary
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.remote import client as remote
from onboard.workflow.remote.handed import require_inside

ARTIFACT = "gather.json"
Tied = list[tuple[str, str]]
Measured = tuple[dict[str, int], list[str], Tied]


class Gather(Phase):
    """Everything that comes from outside: the model's files, its size, and whether it is fit to go
    on with.
    """

    name = "gather"
    judges_input: ClassVar[bool] = True

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the model's files and on the options that decide what is refused."""
        options = context.options
        context.source.config()  # refuses what is no model's folder before its files are listed
        return {
            "model": context.model,
            "revision": context.source.revision,
            "files": fingerprint(context.source.files())
            if context.source.revision is None
            else None,
            "device": options.device,
            "dtype": options.dtype,
            "trust_remote_code": options.trust_remote_code,
            "unsandboxed": options.unsandboxed,
            "weights": options.weights,
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Check config, architecture, code, memory and weights, in the order of what they cost."""
        from onboard.quantised.read_method import read_method

        config = context.source.config()
        folder = context.source.files()
        remote_code = require_consent_for_code(
            config, folder, trusted=context.options.trust_remote_code
        )
        require_causal_lm(config)
        method = read_method(config, folder)  # before headers are asked for
        tensors = stored_tensors(context.source, method)
        code = _own_code(folder, config) if remote_code else None
        measured = _measure_own_code(context, tensors) if code else _measure(folder, tensors)
        counts, notes, tied = measured
        notes += _code_notes(config, remote_code=remote_code) + _part_notes(folder)
        gpu = bool(device_memory(context.options.device).gpus)
        size = estimate_size(context.source, context.options.dtype, counts, tensors, gpu=gpu)
        notes += check_vocabulary(folder, config, generates=context.options.weights)
        memory = check_memory(size, context)
        weights = _gather_weights(context, folder, tied)
        facts = _facts(context, config, folder, size) | {
            "remote_code": remote_code,
            **({"code": code.as_json(), "walls": remote.walls(context)} if code else {}),
            "memory": memory,
            "weights": weights,
            "notes": notes,
        }
        path = context.write_json(ARTIFACT, facts)
        said = "; ".join([f"{size}, {memory}, weights {weights}", *notes])
        return PhaseResult({"gather": context.relative(path)}, said)


def _measure(folder: Path, tensors: dict[str, Any]) -> Measured:
    """Return the model's elements by dtype, what is left out of a checkpoint with these tensors, and
    which of these it has as one weight; raise `OnboardError` where transformers' own model fails at
    its sizes.
    """
    from onboard.graph.weight_load.rehearsed_load import tied_in

    model = build_on_meta(folder)
    check_own_sizes(model)
    counts, tied = module_counts(model), [*tied_in(model, tensors)]
    return counts, check_fit(model, tensors) if tensors else [], tied


def _measure_own_code(context: RunContext, tensors: Collection[str]) -> Measured:
    """Do the same without a comparison: a model's own code may rename tensors as it loads them."""
    built, walls = remote.call(context, "measure"), remote.walls(context)
    tied = [pair for pair in built.tied if {*pair} <= {*tensors}]
    lacking = f", without {' and '.join(walls['missing'])}" if walls["missing"] else ""
    notes = [
        "the repository's own code decides which tensors it reads",
        f"it runs behind walls: {', '.join(walls['hold']) or 'none'}{lacking}",
    ]
    return built.counts, notes, tied


def _own_code(folder: Path, config: dict[str, Any]) -> CodeSurvey:
    """Return what the repository's own code is, all of which lies in its folder."""
    survey = survey_code(folder, config)
    require_inside(folder, survey.files)
    return survey


def require_consent_for_code(config: dict[str, Any], folder: Path, *, trusted: bool) -> bool:
    """Return whether the repository's own code is needed; raise `ConsentRequiredError` when it is
    and nobody agreed.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = config["model_type"]
    if model_type in CONFIG_MAPPING_NAMES:
        return False
    if "AutoConfig" not in _auto_map(config) and known_type(model_type) is None:
        raise OnboardError(
            f"transformers does not know the model type {model_type!r}, and the model brings no code for it",
            hint="A newer transformers may know it",
        )
    if not trusted:
        raise ConsentRequiredError(
            f"auto_map names Python code of the model's repository, which would be run ({_seen(folder, config)})",
            hint="Read that code; then run again with --trust-remote-code"
            + (f". {_instead(model_type)}" if model_type.endswith(OWN_CODE) else ""),
        )
    return True


def _instead(model_type: str) -> str:
    """Return how to have the class of the same type that transformers has."""
    known = model_type.removesuffix(OWN_CODE)
    return f"Or take transformers' own {known}: leave auto_map out of a copy's config.json"


def _code_notes(config: Mapping[str, Any], *, remote_code: bool) -> list[str]:
    """Say whose code is the reference, where there are two, and where it is read."""
    named = (str(name).rpartition("--")[0] for name in _auto_map(config).values())
    elsewhere = " and ".join(sorted({*filter(None, named)}))
    copies = [f"auto_map names the code of {elsewhere}: the copies of it in this folder are read"]
    return _references(config, remote_code=remote_code) + (
        copies if elsewhere and remote_code else []
    )


def _references(config: Mapping[str, Any], *, remote_code: bool) -> list[str]:
    if remote_code and config["model_type"].endswith(OWN_CODE):
        known = config["model_type"].removesuffix(OWN_CODE)
        return [f"the reference is the repository's own code, not transformers' {known}"]
    if not remote_code and _auto_map(config):
        return ["auto_map names no AutoModelForCausalLM: the reference is transformers' own class"]
    return []


def _part_notes(folder: Path) -> list[str]:
    """Say which part of a model this is, where the others are code that nobody has agreed to run."""
    if (part := part_of(folder)) is None:
        return []
    own = f"the language model inside, whose tensors are {part.prefix}*"
    return [f"{own}; towers and processor are code of the repository, and text needs none of it"]


def _seen(folder: Path, config: dict[str, Any]) -> str:
    """Return what reading the code, without running it, shows."""
    try:
        return str(survey_code(folder, config))
    except OnboardError as error:
        return error.message


def require_causal_lm(config: dict[str, Any]) -> None:
    """Raise `OnboardError` unless the config names a decoder that predicts the next token."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    if config.get("is_encoder_decoder"):
        raise OnboardError(
            f"{config['model_type']} is an encoder-decoder", hint="Only causal language models work"
        )
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        str(name).isidentifier() for name in architectures
    ):
        raise OnboardError(
            f"config.json has architectures {architectures!r}, which are no names",
            hint="Do not trust it",
        )
    names = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    architecture = architectures[0] if architectures else names.get(config["model_type"])
    known = [
        *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
        *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    ]
    if architecture not in known and "AutoModelForCausalLM" not in _auto_map(config):
        found = architecture or f"the model type {config['model_type']}"
        raise OnboardError(
            f"{found} is not a causal language model", hint="Only causal language models work"
        )


def _auto_map(config: Mapping[str, Any]) -> dict[str, Any]:
    auto_map = config.get("auto_map")
    return auto_map if isinstance(auto_map, dict) else {}


def check_memory(size: ModelSize, context: RunContext) -> str:
    """Say whether the weights fit; raise `ConsentRequiredError` when they exceed the memory of the
    device of a run.

    With --yes that is only said, and so it is when no phase of this run needs the weights.
    """
    memory = device_memory(context.options.device)
    if context.options.device == "cuda" and not memory.gpus:
        raise UsageError(
            "the device cuda was asked for, and this system has no GPU", hint="Use --device cpu"
        )
    if size.bytes <= memory.total:
        return f"fits in {memory}"
    if context.options.yes:
        return f"exceeds {memory}, accepted with --yes"
    if not context.options.weights:
        return f"exceeds {memory}, which only a run needs"
    raise ConsentRequiredError(
        f"This model requires ~{gigabytes(size.bytes)} GB but the system only has {memory}. "
        "Onboarding is likely to fail at the run phase",
        hint="Use --yes to go on all the same",
    )


def _gather_weights(context: RunContext, folder: Path, tied: Tied) -> str:
    """Check the weights that are here; fetch them first when a later phase of this run reads
    them.
    """
    if context.options.weights:
        folder = context.source.weights()
    elif not has_weights(folder) and context.source.revision is not None:
        return "not fetched yet"
    check_weights(context.source.weights(), tied)
    return "checked"


def fingerprint(folder: Path) -> dict[str, list[int]]:
    """Return size and modification time (ns) of every file in a local model folder."""
    stats = {
        _shown(path.relative_to(folder)): path.stat()
        for path in sorted(_below(folder))
        if path.is_file()
    }
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _below(folder: Path) -> Iterator[Path]:
    for count, path in enumerate(folder.rglob("*"), start=1):
        FILES.check(count, folder)
        yield path


def _shown(path: Path) -> str:
    """Return a path as text, with what is not UTF-8 in its name written out."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _facts(
    context: RunContext, config: dict[str, Any], folder: Path, size: ModelSize
) -> dict[str, Any]:
    small = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in {".json", ".py", ".txt"}
    ]
    return {
        "model": context.model,
        "revision": context.source.revision,
        "model_type": config["model_type"],
        "architectures": config.get("architectures"),
        "parameters": size.parameters,
        "bytes": size.bytes,
        **({"stored_bytes": size.stored} if size.stored else {}),
        "size_from": size.basis,
        "files": {
            _shown(Path(path.name)): hashlib.sha256(path.read_bytes()).hexdigest() for path in small
        },
    }
