"""What a run says in its log as it goes: settings, transforms, prompts and outputs, comparisons,
facts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("onboard.run")


def tell_built(settings: Mapping[str, Any], transforms: list[dict[str, Any]]) -> None:
    """Log what the model runs with and what each transform did."""
    log.info("settings: %s", ", ".join(f"{name} {value}" for name, value in settings.items()))
    for entry in transforms:
        done = (
            "skipped"
            if entry["skipped"] or not entry["enabled"]
            else f"{entry['num_matches']} matches"
        )
        log.info(
            "transform %s/%s: %s, %.3f s", entry["stage"], entry["key"], done, entry["seconds"]
        )


def tell_generated(result: Mapping[str, Any]) -> None:
    """Log each prompt and its output, then the figures."""
    for prompt in result["prompts"]:
        log.info("prompt %r", prompt["token_ids"] if prompt["prompt"] is None else prompt["prompt"])
        log.info(
            "output %r (%s)", prompt["output"] or prompt["output_ids"], prompt["finish_reason"]
        )
    seconds, cache = (
        result["seconds"],
        ", ".join(f"{name} {value}" for name, value in result["cache"].items()),
    )
    log.info("seconds: %s", ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()))
    log.info(
        "%.1f tokens/s, peak memory %d bytes",
        result["tokens_per_second"],
        result["peak_memory_bytes"],
    )
    log.info("cache: %s; CUDA graphs: %d replays", cache, result["cuda_graphs"]["replays"])


def tell_compared(comparison: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Log how far the run is from transformers."""
    for check in comparison["checks"]:
        log.info(
            "compared %s",
            ", ".join(f"{name} {value}" for name, value in check.items() if value is not None),
        )
    log.info(
        "tokens %s", ", ".join(f"{name} {value}" for name, value in comparison["tokens"].items())
    )
    log.info("text %s: %s", text["verdict"], text["reason"])
    for note in comparison["notes"]:
        log.info("note: %s", note)


def tell_ended(result: Mapping[str, Any]) -> None:
    """Log the facts and the status."""
    for fact in result["facts"]:
        log.info("fact: %s", fact)
    log.info("%s%s", result["status"], f": {result['error']}" if result["error"] else "")
