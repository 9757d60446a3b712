"""matrix: add the model to the support matrix, with no more than a run has shown."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from onboard import registry
from onboard.analysis.spec import ModelSpec
from onboard.content import CONTENT_ROOT
from onboard.errors import OnboardError
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.phases.register import ARTIFACT as REGISTRATION
from onboard.workflow.phases.run import ARTIFACT as RUN
from onboard.workflow.tables import cell, upsert_footnote, upsert_row

MODELS, FEATURES = "## Models", "## Features"
UNTESTED = "Untested"
NOT_JUDGED = ", text not judged"
SHOWN_TRAITS = (
    "attention",
    "rope",
    "position",
    "norm",
    "mlp",
    "activation",
    "moe",
    "qk_norm",
    "sliding_window",
    "attention_softcap",
    "logit_softcap",
    "tied_embeddings",
)


class Matrix(Phase):
    """Adds or updates the model's rows in `registry/supported_models.md`."""

    name = "matrix"
    shared: ClassVar[frozenset[str]] = frozenset({"matrix"})

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on what the rows say."""
        registration = context.read_json(REGISTRATION)
        rows = model_row(context.spec, registration, context.read_json(RUN))
        return {"rows": [rows, feature_row(context.spec, registration, context.read_json(RUN))]}

    def run(self, context: RunContext) -> PhaseResult:
        """Update the matrix under the registry's lock."""
        path = matrix_path(context.root)
        with nullcontext() if context.options.dry_run else registry.registry_lock(context.root):
            text = path.read_text(encoding="utf-8") if path.exists() else empty_matrix()
            context.files.write(path, updated_matrix(text, context))
        return PhaseResult(artifacts={"matrix": context.relative(path)}, summary=f"row in {context.relative(path)}")


def updated_matrix(text: str, context: RunContext) -> str:
    """Return a support matrix with what a run found of its model."""
    return update_matrix(text, context.spec, context.read_json(REGISTRATION), context.read_json(RUN))


def update_matrix(text: str, spec: ModelSpec, registration: dict[str, Any], run: dict[str, Any] | None) -> str:
    """Return a support matrix with the model's rows and footnote in it; the rest stays as it is.

    Without a `run` the rows say what the model is, and that nobody has tried it.
    """
    try:
        text = upsert_row(text, MODELS, model_row(spec, registration, run), 2, merge_model_rows)
        text = upsert_row(text, FEATURES, feature_row(spec, registration, run), 1, merge_feature_rows)
    except ValueError as error:
        raise OnboardError(
            f"registry/supported_models.md: {error}", hint="Restore the table's heading and header row"
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
        if not line.startswith("[^") and not (line.startswith("|") and index not in rules and index + 1 not in rules)
    ]
    return "\n".join(kept).rstrip() + "\n"


def model_row(spec: ModelSpec, registration: dict[str, Any], run: dict[str, Any] | None) -> list[str]:
    """Return Architecture, Model, Family, Features, Verified on, Config."""
    return [
        f"`{cell(spec.architecture)}`",
        cell(registration["name"]),
        cell(spec.family),
        cell(", ".join(features(spec))),
        cell(verified_on(run) if run else UNTESTED),
        f"[^{registration['config_id']}]",
    ]


def merge_model_rows(old: list[str], new: list[str]) -> list[str]:
    """Keep what earlier runs verified; the rest is as the newest run says."""
    verified = {part for row in (old, new) for part in row[4].split("; ") if part not in ("", UNTESTED)}
    verified -= {f"{part}{NOT_JUDGED}" for part in verified}
    return [*new[:4], "; ".join(sorted(verified)) or UNTESTED, new[5]]


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


def verified_on(run: dict[str, Any]) -> str:
    """Return device and dtype of a successful full run, and whether its text could be judged."""
    full = run["runs"]["full"]
    if full["status"] != "success":
        return UNTESTED
    note = "" if full["text"]["verdict"] == "equal" else NOT_JUDGED
    return f"{full['settings']['device']} {full['settings']['dtype']}{note}"


def feature_row(spec: ModelSpec, registration: dict[str, Any], run: dict[str, Any] | None) -> list[str]:
    """Return the model's name and Yes, No, Untested or N/A for each column."""
    full = run["runs"]["full"] if run else None
    batched = full and len(full["prompts"]) > 1 and full["comparison"]["agrees"]
    return [
        cell(registration["name"]),
        _cuda_graphs(full) if full else UNTESTED,
        "Yes" if batched else UNTESTED,
        UNTESTED,
        _sliding_window(spec, full),
        "No",
        UNTESTED if "quantization_config" in spec.config else "N/A",
    ]


def merge_feature_rows(old: list[str], new: list[str]) -> list[str]:
    """Keep an old finding where the new run tells nothing."""
    return [before if after == UNTESTED and before else after for before, after in zip(old, new, strict=True)]


def _cuda_graphs(full: dict[str, Any]) -> str:
    if full["settings"]["device"] != "cuda":
        return UNTESTED
    return "Yes" if full["cuda_graphs"]["used"] else "No"


def _sliding_window(spec: ModelSpec, full: dict[str, Any] | None) -> str:
    """Yes when a prompt was longer than the window and the run still agreed with transformers."""
    window = spec.traits["sliding_window"].value if "sliding_window" in spec.traits else None
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        return "N/A"
    if full is None:
        return UNTESTED
    longest = max(check["longest"] for check in full["comparison"]["checks"])
    return "Yes" if longest > window and full["comparison"]["agrees"] else UNTESTED


def _footnote(registration: dict[str, Any]) -> str:
    name = Path(registration["config"]).name
    return f"[configs/{name}](configs/{name})"
