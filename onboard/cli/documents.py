"""What `--json` prints: one document a command, all of one shape. docs/json.md is the schema in
words.

A document has the fields of `Document` and, beside them, those of its command. Of a command that
did not come to its end only those of `Document` are certain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from onboard.cli.result import Result
from onboard.errors import OnboardError, exit_code

SCHEMA = 1
Status = Literal["done", "failed", "interrupted"]


class Problem(BaseModel):
    """Why a command did not end well."""

    model_config = ConfigDict(extra="forbid")

    message: str
    """What was wrong, without its hint."""
    hint: str = ""
    """What to do."""
    exit_code: int
    """What the command exits with; `onboard.errors.EXIT_CODES` says what it means."""


class Document(BaseModel):
    """What every document has."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_number: int = Field(default=SCHEMA, alias="schema")
    """Grows when a field goes or changes its meaning; new fields do not change it."""
    command: str
    status: Status
    error: Problem | None
    """None exactly when the status is "done" and the exit code 0."""


class PhaseDocument(BaseModel):
    """One phase of `onboard MODEL`."""

    model_config = ConfigDict(extra="forbid")

    name: str
    status: Literal["done", "skipped", "planned", "failed", "interrupted"]
    seconds: float
    artifacts: dict[str, str]
    error: str | None


class ModelDocument(Document):
    """`onboard MODEL` and `onboard demo`; paths are absolute."""

    model: str
    phases: list[PhaseDocument]
    artifacts: dict[str, str]
    files: list[dict[str, Any]] | None = None
    """With --dry-run: `path`, `diff` and whether the file is `internal`, one that only records the
    run.
    """
    replaced: list[dict[str, str]] | None = None
    """Files of the user that were replaced: `path` and `backup`."""


class RunDocument(Document):
    """`onboard run`."""

    model: str
    outputs: list[dict[str, Any]]
    """One a prompt: `prompt`, `prompt_token_ids`, `num_cached_tokens`, `outputs` with `text`,
    `token_ids`, `finish_reason`, `logprobs`, `stop_reason`, `num_preemptions`."""
    limits: dict[str, int]
    """`max_seq_len`, `max_batch_size` and `max_num_tokens`, of which memory may have left less than
    was configured.
    """
    stats: dict[str, float]
    facts: list[str]
    benchmark: dict[str, dict[str, float]] | None = None
    """With --benchmark: of `onboard`, and of `transformers` if it ran, `prefill`, `decode_step` and
    `duration` in seconds, medians for all prompts together, and `tokens_per_second`."""
    pytorch: dict[str, Any] | None = None
    """With --enable-pytorch-run: transformers' `token_ids` of each prompt, and whether ours are the
    `same`."""


class EvalDocument(Document):
    """`onboard eval`."""

    model: str
    tasks: dict[str, dict[str, float]]
    """Metrics by task."""
    items: dict[str, int]
    """How many items each task had."""
    facts: list[str]
    hf: dict[str, dict[str, float]] | None = None
    """With --compare: the same metrics of the harness's back end for transformers."""
    differences: dict[str, list[int]] | None = None
    """With --compare: the items of each task that were answered otherwise."""


class VerifyDocument(Document):
    """`onboard verify`."""

    model: str
    device: str
    dtype: str
    seed: int
    prompt_lengths: list[int]
    tolerance: float
    reference_error: float
    beside: str
    """What it was compared with: transformers, or the repository's own code."""
    world_size: int
    checks: list[dict[str, Any]]
    """One a transform: `transform`, `errors` by the way of running, `usual`, `limit`, `exception`,
    `matched`.
    """
    facts: list[str]
    graph_replays: int
    passed: bool
    first_failure: str | None


class KldDocument(Document):
    """`onboard kld`; divergences in nats, null: infinite."""

    a: dict[str, Any]
    """`model`, `device`, `dtype`, `settings` and `facts`."""
    b: dict[str, Any]
    text: str
    seed: int | None
    """Of random tokens."""
    tokens: int
    window: int
    mean: float | None
    p99: float | None
    largest: float | None
    top1: float
    top5: float
    perplexity_a: float | None
    perplexity_b: float | None
    max_mean: float | None
    passed: bool
    facts: list[str]


class PlanDocument(Document):
    """`onboard plan`; sizes in bytes."""

    model_config = ConfigDict(extra="allow")

    model: str
    memory: int
    parameters: int
    weights: int
    total: int
    fits: bool
    span: int
    """Activations and graphs may take so many times less; 1: they were counted."""
    limits: dict[str, int | None]
    largest_batches: list[dict[str, int]]
    gpus_needed: dict[str, int | None]
    """By kind of GPU: how many all sequences need, null for more than 64; of several ranks one each,
    null where it does not hold one.
    """
    facts: list[str]


class BenchDocument(Document):
    """`onboard bench`: what bench.json has."""

    model_config = ConfigDict(extra="allow")

    model_id: str
    seed: int
    versions: dict[str, str]
    hardware: dict[str, Any]
    startup: dict[str, Any]
    results: list[dict[str, Any]]
    facts: list[str]


class ExplainDocument(Document):
    """`onboard explain`; sizes in bytes, times in microseconds."""

    model_config = ConfigDict(extra="allow")

    model: str
    layers: list[dict[str, Any]]
    """Layers that are alike: `layers`, `count`, `bytes` and `parts`."""
    transforms: list[dict[str, Any]]
    not_applied: list[dict[str, Any]]
    profile: dict[str, Any] | None
    floor: dict[str, Any]


class TuneDocument(Document):
    """`onboard tune`."""

    model_config = ConfigDict(extra="allow")

    device: str
    seed: int
    trials: list[dict[str, Any]]
    changes: dict[str, Any]
    facts: list[str]


class SweepDocument(Document):
    """`onboard sweep`: what registry/coverage.json has."""

    model_config = ConfigDict(extra="allow")

    schema_version: int
    versions: dict[str, str]
    entries: list[dict[str, Any]]


class ExportDocument(Document):
    """`onboard export`."""

    model: str
    to: Literal["plain", "vllm-plugin"]
    folder: str
    """Absolute."""
    package: str
    files: list[str]
    """Paths in the folder."""
    provenance: dict[str, str]
    """What the package's README says of the model and of what was proven."""


class StatusDocument(Document):
    """`onboard status`."""

    root: str
    models: dict[str, dict[str, Any]]
    """By the name of the work folder: what state.json has; a phase that an interrupt ended is
    "interrupted".
    """
    agents: dict[str, list[dict[str, Any]]]
    """By the same names: what agents.json has, without whole files."""
    pull_requests: list[dict[str, Any]]
    """As `onboard pr status` has them."""


class PullRequestDocument(Document):
    """`onboard pr open`, `update` and `watch`."""

    pull_request: dict[str, Any]
    """What pull_request.json has: `repository`, `number`, `url`, `head`, `target`, `pushed` commits,
    what was `handled`, why it has `ended`.
    """


class PullRequestsDocument(Document):
    """`onboard pr status`."""

    pull_requests: list[dict[str, Any]]
    """One a model: `model`, `url`, `head`, `target`, `status`, `commit`, `last_activity`, `handled`,
    `waiting` (each with `who`) and the `watcher`.
    """


class DoctorDocument(Document):
    """`onboard doctor`."""

    facts: dict[str, str]
    extensions: dict[str, str]
    """By where each comes from: what it brings, or what is wrong with it."""


class CheckDocument(Document):
    """`onboard check`."""

    drifted: dict[str, list[str]]
    """By family: the paths that are not as generated."""


MODELS: dict[str, type[Document]] = {
    "model": ModelDocument,
    "demo": ModelDocument,
    "run": RunDocument,
    "eval": EvalDocument,
    "verify": VerifyDocument,
    "kld": KldDocument,
    "plan": PlanDocument,
    "bench": BenchDocument,
    "tune": TuneDocument,
    "sweep": SweepDocument,
    "explain": ExplainDocument,
    "export": ExportDocument,
    "status": StatusDocument,
    "doctor": DoctorDocument,
    "check": CheckDocument,
    "pr open": PullRequestDocument,
    "pr update": PullRequestDocument,
    "pr watch": PullRequestDocument,
    "pr status": PullRequestsDocument,
}


def render(command: str, result: Result) -> str:
    """Return the document of a command's end as JSON."""
    error = result.error
    head = Document(
        command=command, status=_status(error), error=_problem(error) if error is not None else None
    )
    return json.dumps(
        head.model_dump(by_alias=True) | _without_head(result.fields), indent=2, ensure_ascii=False
    )


def _without_head(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name not in ("schema", "command", "status", "error")
    }


def _status(error: BaseException | None) -> Status:
    return (
        "done"
        if error is None
        else "interrupted"
        if isinstance(error, KeyboardInterrupt)
        else "failed"
    )


def _problem(error: BaseException) -> Problem:
    if isinstance(error, OnboardError):
        return Problem(message=error.message, hint=error.hint, exit_code=exit_code(error))
    if isinstance(error, KeyboardInterrupt):
        return Problem(message="interrupted", exit_code=exit_code(error))
    return Problem(
        message=" ".join(f"internal error: {type(error).__name__}: {error}".split()), exit_code=1
    )
