"""Runs of lm-evaluation-harness: a model's scores on tasks, also beside its own back end `hf`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from onboard.errors import OnboardError, UsageError
from onboard.evaluation.harness_model import HarnessModel

TOLERANCE = 1e-4
"""Most that log-probabilities of an item may differ, in nats; a hundredth of it by their size."""


@dataclass(frozen=True)
class Wanted:
    """What is evaluated, and how."""

    tasks: Sequence[str]
    """Names of tasks, or files of them."""
    limit: int | None = None
    """Items of each task; None: all."""
    num_fewshot: int | None = None
    chat: bool = False
    """Whether prompts are written by the checkpoint's chat template."""


@dataclass(frozen=True)
class Scores:
    """What came of a run."""

    metrics: dict[str, dict[str, float]]
    """By task and metric."""
    responses: dict[str, list[Any]]
    """Of each task's items, in order: log-probabilities, or texts."""


def evaluate(model: Any, wanted: Wanted, **options: Any) -> Scores:
    """Return the scores of a model: a `HarnessModel`, or the name of another back end with its
    `model_args`.

    Raises:
        UsageError: there is no such task.
        OnboardError: a task's data cannot be had.
    """
    names, folders = _split(wanted.tasks)
    own = all(Path(each).is_file() for each in wanted.tasks)
    # To read the harness's own thousands of tasks takes half a minute.
    manager = TaskManager(include_path=folders or None, include_defaults=not own)
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        raise UsageError(f"there is no task {unknown[0]!r}", hint="Give a name, or a task's file")
    try:
        found = simple_evaluate(
            model,
            tasks=names,
            task_manager=manager,
            limit=wanted.limit,
            num_fewshot=wanted.num_fewshot,
            apply_chat_template=wanted.chat,
            bootstrap_iters=0,
            **options,
        )
    except OnboardError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise OnboardError(f"the tasks cannot be run ({reason})") from error
    return Scores(
        {task: _numbers(values) for task, values in found["results"].items()},
        {
            task: [
                each["filtered_resps"] for each in sorted(items, key=lambda item: item["doc_id"])
            ]
            for task, items in found["samples"].items()
        },
    )


def evaluate_hf(checkpoint: Path, wanted: Wanted, model: HarnessModel, dtype: str) -> Scores:
    """Return the scores of the harness's back end for transformers, on the same items and texts of
    the same length.
    """
    arguments = {"pretrained": str(checkpoint), "dtype": dtype, "max_length": model.max_length}
    device = str(model.llm.device)
    return evaluate("hf", wanted, model_args=arguments, device=device, batch_size=1)


def differences(ours: Scores, theirs: Scores) -> dict[str, list[int]]:
    """Return for each task the items whose responses differ by more than rounding."""
    return {
        task: [
            index
            for index, pair in enumerate(zip(items, theirs.responses[task], strict=True))
            if not _alike(*pair)
        ]
        for task, items in ours.responses.items()
    }


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        same_length = isinstance(other, list | tuple) and len(one) == len(other)
        return same_length and all(map(_alike, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=TOLERANCE / 100, abs_tol=TOLERANCE)
    return bool(one == other)


def _split(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of tasks, and the folders in which files define them."""
    import yaml

    names, folders = [], []
    for each in tasks:
        if not (path := Path(each)).is_file():
            names.append(each)
            continue
        loader: Any = yaml.BaseLoader  # values stay texts, and a tag makes nothing
        found = yaml.load(path.read_text("utf-8"), Loader=loader)
        if not isinstance(found, dict) or not isinstance(found.get("task"), str):
            raise UsageError(f"{each} names no task", hint="It needs a key `task`")
        names.append(found["task"])
        folders.append(str(path.resolve().parent))
    return names, list(dict.fromkeys(folders))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    known = {key: value for key, value in values.items() if isinstance(value, int | float)}
    return {key.removesuffix(",none"): float(value) for key, value in known.items()}
