"""What runs of registered models showed: `registry/results.jsonl`, one line for each model, device,
dtype, and number of ranks that was asked for.

The support matrix says of a model what these rows say. Call what writes them under `registry_lock`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from onboard.config import StrictModel
from onboard.content import CONTENT_ROOT
from onboard.errors import OnboardError, UsageError
from onboard.git import commit_of
from onboard.runtime.tested_file import passed_tests
from onboard.workflow.files import write_atomically
from onboard.workflow.run_state import current_versions

YES, NO, UNTESTED, NOT_THERE = "Yes", "No", "Untested", "N/A"
FEATURES = (
    "cuda_graphs",
    "batched_decode",
    "chunked_prefill",
    "prefix_reuse",
    "sliding_window",
    "tensor_parallel",
)
"""What a run can show, in the order of the matrix."""
KNOWN_PREFIX = "known prefix"
"""What the run agent's comparison (which imports torch) calls its check of a prompt that is asked
again.
"""


class Result(StrictModel):
    """One run of a registered model. Times in seconds, memory in bytes."""

    name: str
    status: Literal["passed", "failed"]
    outcome: str = ""
    """success, compile_error, runtime_error, bad_generation, timeout or lost."""
    error: str | None = None
    date: str
    """When it ended, UTC."""
    device: str = ""
    gpu: str | None = None
    dtype: str = ""
    layers: int | None = None
    """How many of its layers the model had; None: all."""
    world_size: int | None = None
    """On how many ranks, where a run was asked for so many; None: as the entry is configured."""
    tokens_per_second: float | None = None
    perplexity: float | None = None
    reference_perplexity: float | None = None
    """That of transformers on the same texts."""
    text: str = ""
    """equal, worse or not judged."""
    peak_memory_bytes: int | None = None
    seconds: float | None = None
    """That the whole run took."""
    features: dict[str, str] = Field(default_factory=dict)
    """Yes, No or Untested for each of `FEATURES`: what this run showed."""
    versions: dict[str, str] = Field(default_factory=dict)
    commit: str = ""
    """That of the program's checkout, with "-dirty" where it has changes; empty without one."""
    command: str = ""
    log: str = ""
    model_file: str = ""
    key: str = ""
    """The digest of everything that the result depends on; empty for a run of the workflow."""

    @property
    def place(self) -> tuple[str, str, str, bool, int]:
        """What a later run must share to take this row's place."""
        ranks = self.world_size or 0
        return self.name, self.device, self.dtype, self.layers is not None, ranks

    @property
    def on_ranks(self) -> str:
        """On how many ranks it ran, as a phrase; empty where none were asked for."""
        size = self.world_size
        return "" if size is None else f" on {size} rank{'s' if size > 1 else ''}"

    @property
    def shows(self) -> str:
        """Device, dtype and ranks, and whether its text could be judged."""
        return f"{self.device} {self.dtype}{self.on_ranks}{'' if self.text == 'equal' else ', text not judged'}"


def results_path(root: Path) -> Path:
    """Return where a root keeps its results."""
    return root / "registry" / "results.jsonl"


def load_results(root: Path) -> list[Result]:
    """Return the root's rows; raise `OnboardError` for a line that is none."""
    path = results_path(root)
    return parse_results(path.read_text(encoding="utf-8")) if path.exists() else []


def parse_results(text: str) -> list[Result]:
    """Return the rows of a `results.jsonl`."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows += [Result.model_validate_json(line)] if line.strip() else []
        except (ValidationError, UsageError) as error:
            reason = str(error).splitlines()[0]
            raise OnboardError(
                f"registry/results.jsonl:{number}: {reason}", hint="Remove the line"
            ) from error
    return rows


def with_result(rows: Sequence[Result], new: Result) -> list[Result]:
    """Return the rows with a new one in the place of an older one, sorted."""
    return sorted(
        [*(row for row in rows if row.place != new.place), new], key=lambda row: row.place
    )


def text_of(rows: Sequence[Result]) -> str:
    """Return the text of a `results.jsonl`."""
    return "".join(f"{row.model_dump_json(exclude_defaults=True)}\n" for row in rows)


def save_result(root: Path, new: Result) -> list[Result]:
    """Write a new row; return all of them."""
    rows = with_result(load_results(root), new)
    write_atomically(results_path(root), text_of(rows))
    return rows


def result_of(name: str, full: Mapping[str, Any], window: int | None, **fields: Any) -> Result:
    """Return the row of what the run agent found.

    `window` is the model's sliding window, 0 where it has none, None where nobody knows.
    """
    settings, text = full.get("settings", {}), full.get("text") or {}
    own = {
        "status": "passed" if full["status"] == "success" else "failed",
        "outcome": full["status"],
        "error": full.get("error"),
        "date": now(),
        "device": settings.get("device", ""),
        "gpu": settings.get("device_name") if settings.get("device") == "cuda" else None,
        "dtype": settings.get("dtype", ""),
        "tokens_per_second": full.get("tokens_per_second"),
        "perplexity": text.get("perplexity"),
        "reference_perplexity": text.get("reference"),
        "text": text.get("verdict", ""),
        "peak_memory_bytes": full.get("peak_memory_bytes"),
        "features": shown_features(full, window),
        "versions": current_versions(),
        "commit": commit_of(CONTENT_ROOT),
    }
    return Result.model_validate({"name": name, **own, **fields})


def now() -> str:
    """Return the time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def shown_features(full: Mapping[str, Any], window: int | None) -> dict[str, str]:
    """Return what a run showed to work, or not to."""
    comparison = full.get("comparison") or {}
    if full["status"] != "success" or not comparison.get("agrees"):
        return dict.fromkeys(FEATURES, UNTESTED)
    longest = max(check["longest"] for check in comparison["checks"])
    chunk = full["settings"].get("max_num_tokens")
    graphs = full["cuda_graphs"]["used"]
    return {
        "cuda_graphs": UNTESTED if full["settings"]["device"] != "cuda" else YES if graphs else NO,
        "batched_decode": YES if len(full["prompts"]) > 1 else UNTESTED,
        "chunked_prefill": YES if chunk and longest > chunk else UNTESTED,
        "prefix_reuse": YES
        if any(check["what"] == KNOWN_PREFIX for check in comparison["checks"])
        else UNTESTED,
        "sliding_window": NOT_THERE
        if window == 0
        else YES
        if window and longest > window
        else UNTESTED,
        "tensor_parallel": YES if full["settings"].get("world_size", 1) > 1 else UNTESTED,
    }


def with_tests(result: Result, model_file: Path, root: Path) -> Result:
    """Return a row to which the tests of the model's file add what they showed: cached decode
    prefills in chunks.
    """
    if "test_cached_decode" not in passed_tests(model_file, root):
        return result
    return result.model_copy(update={"features": {**result.features, "chunked_prefill": YES}})


def verified(rows: Sequence[Result]) -> str:
    """Return where a model was seen to work, and that its last run failed; empty for one that
    nobody has tried.
    """
    whole = [row for row in rows if row.layers is None]
    parts = sorted({row.shows for row in whole if row.status == "passed"})
    last = {row.on_ranks: row for row in sorted(whole, key=lambda row: row.date)}
    failed = [
        f"failed{ranks} on {row.date[:10]}"
        for ranks, row in sorted(last.items())
        if row.status == "failed"
    ]
    return "; ".join([*parts, *failed])


def features_of(rows: Sequence[Result]) -> dict[str, str]:
    """Return what is known of each feature, from the newest run of all layers that tells
    anything.
    """
    newest = sorted(
        (row for row in rows if row.layers is None), key=lambda row: row.date, reverse=True
    )
    found: dict[str, str] = {}
    for feature in FEATURES:
        told = (row.features.get(feature, UNTESTED) for row in newest)
        found[feature] = next((value for value in told if value != UNTESTED), UNTESTED)
    return found
