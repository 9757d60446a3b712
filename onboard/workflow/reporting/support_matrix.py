"""The support matrix, `registry/supported_models.md`: rows of what runs have shown, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onboard import registry
from onboard.analysis.spec import ModelSpec
from onboard.content import CONTENT_ROOT
from onboard.errors import OnboardError
from onboard.quantised.said import describe_config
from onboard.workflow.phase import RunContext
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.registry_results import FEATURES as RUN_FEATURES
from onboard.workflow.registry_results import (
    NO,
    NOT_THERE,
    UNTESTED,
    YES,
    Result,
    features_of,
    verified,
)
from onboard.workflow.reporting.markdown_tables import (
    cell,
    rows_under,
    upsert_footnote,
    upsert_row,
    with_column,
)

MODELS, FEATURES = "## Models", "## Features"
ADDED_COLUMN = ("Prefix reuse", "Chunked prefill", UNTESTED)
"""A column that matrices of before it lack, the one that it comes behind, and what is known of
their models.
"""
SHOWN_TRAITS = (
    "attention",
    "rope",
    "position",
    "norm",
    "mlp",
    "activation",
    "experts",
    "experts_per_token",
    "shared_experts",
    "sliding_window",
    "attention_softcap",
    "logit_softcap",
    "tied_embeddings",
)


def updated_matrix(text: str, context: RunContext, results: Sequence[Result]) -> str:
    """Return a support matrix with what is known of a run's model."""
    registration = context.read_json(REGISTRATION)
    rows = [row for row in results if row.name == registration["name"]]
    return update_matrix(text, context.spec, registration, rows)


def update_matrix(
    text: str, spec: ModelSpec, registration: dict[str, Any], results: Sequence[Result]
) -> str:
    """Return a support matrix with the model's rows and footnote in it; the rest stays as it is.

    Without results the rows say what the model is, and that nobody has tried it.
    """
    rows = model_row(spec, registration, results), feature_row(spec, registration, results)
    return _with_rows(text, rows, registration)


def refreshed(text: str, entry: registry.RegistryEntry, results: Sequence[Result]) -> str:
    """Return a support matrix with what results say of an entry; what the model is stays as the
    table has it.
    """
    known = next((row for row in rows_under(text, MODELS) if row[1] == cell(entry.name)), None)
    about = known or [
        f"`{cell(entry.architecture or '')}`",
        cell(entry.name),
        cell(entry.family or ""),
        "",
        "",
        "",
    ]
    row = [*about[:4], cell(verified(results) or UNTESTED), f"[^{entry.config_id}]"]
    found = features_of(results)
    features = [
        cell(entry.name),
        *(found[name] for name in RUN_FEATURES),
        NOT_THERE if entry.note is None else NO,
    ]
    return _with_rows(
        text, (row, features), {"config_id": entry.config_id, "config": f"{entry.config_id}.yaml"}
    )


def _with_rows(text: str, rows: tuple[list[str], list[str]], registration: dict[str, Any]) -> str:
    try:
        text = with_column(text, FEATURES, *ADDED_COLUMN)
        text = upsert_row(text, MODELS, rows[0], 2, lambda _, new: new)
        text = upsert_row(text, FEATURES, rows[1], 1, _keep_what_the_model_lacks)
    except ValueError as error:
        raise OnboardError(
            f"registry/supported_models.md: {error}",
            hint="Restore the table's heading and header row",
        ) from error
    return upsert_footnote(text, registration["config_id"], _footnote(registration))


def matrix_path(root: Path) -> Path:
    """Return where a root keeps its support matrix."""
    return root / "registry" / "supported_models.md"


def empty_matrix() -> str:
    """Return the shipped matrix without its rows and footnotes: what a new root starts with."""
    lines = matrix_path(CONTENT_ROOT).read_text(encoding="utf-8").splitlines()
    rules = [index for index, line in enumerate(lines) if line.startswith("|---")]
    kept = [
        line
        for index, line in enumerate(lines)
        if not line.startswith("[^")
        and not (line.startswith("|") and index not in rules and index + 1 not in rules)
    ]
    return "\n".join(kept).rstrip() + "\n"


def model_row(
    spec: ModelSpec, registration: dict[str, Any], results: Sequence[Result]
) -> list[str]:
    """Return Architecture, Model, Family, Features, Verified on, Config."""
    return [
        f"`{cell(spec.architecture)}`",
        cell(registration["name"]),
        cell(spec.family),
        cell(", ".join(features(spec))),
        cell(verified(results) or _without_run(spec)),
        f"[^{registration['config_id']}]",
    ]


def _without_run(spec: ModelSpec) -> str:
    """Return why nobody has tried a model: nobody did, or its released weights cannot be read."""
    from onboard.quantised.read_method import describe_unread

    found = describe_unread(spec.config)
    return UNTESTED if found is None else f"Not supported yet: released quantised ({found})"


def features(spec: ModelSpec) -> list[str]:
    """Return the traits that tell architectures apart, as words."""
    words = []
    for name in SHOWN_TRAITS:
        value = spec.traits[name].value if name in spec.traits else None
        if value is True:
            words.append(name.replace("_", " "))
        elif value not in (None, False, "none", ""):
            words.append(f"{name.replace('_', ' ')} {value}")
    return words


def feature_row(
    spec: ModelSpec, registration: dict[str, Any], results: Sequence[Result]
) -> list[str]:
    """Return the model's name and Yes, No, Untested or N/A for each column."""
    found = features_of(results)
    if window(spec) == 0:
        found["sliding_window"] = NOT_THERE
    quantised = _reads_quantised(spec, results)
    return [cell(registration["name"]), *(found[name] for name in RUN_FEATURES), quantised]


def _reads_quantised(spec: ModelSpec, results: Sequence[Result]) -> str:
    """Return whether the quantised weights of a release were read: Yes where a run of them
    passed.
    """
    from onboard.quantised.read_method import describe_unread

    if describe_config(spec.config) is None:
        return NOT_THERE
    if describe_unread(spec.config) is not None:
        return NO
    return YES if verified(results) else UNTESTED


def window(spec: ModelSpec) -> int:
    """Return the model's sliding window in tokens; 0 where it has none."""
    value = spec.traits["sliding_window"].value if "sliding_window" in spec.traits else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _keep_what_the_model_lacks(old: list[str], new: list[str]) -> list[str]:
    """Return the new row, in which a run that cannot tell leaves N/A as it is: that is no finding
    of a run.
    """
    pairs = zip(old, new, strict=True)
    return [
        NOT_THERE if (before, after) == (NOT_THERE, UNTESTED) else after for before, after in pairs
    ]


def _footnote(registration: dict[str, Any]) -> str:
    name = Path(registration["config"]).name
    return f"[configs/{name}](configs/{name})"
