"""The run agent: builds a model from its registry entry in this process, generates, compares,
reports as JSON.

The run phase starts it as `python -m onboard.workflow.run_model.run_model`, a process of its own:
all memory is returned when it ends, and a crash of a kernel does not take the workflow down. First
ours runs and is given back, then transformers'.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from onboard.config import RuntimeConfig
from onboard.errors import NotFiniteError, OnboardError
from onboard.graph.context import TransformContext
from onboard.runtime.resolve import resolve_config
from onboard.untrusted.bounds import RUN_SECONDS
from onboard.untrusted.consent import NO_CONSENT, Consent
from onboard.verify.comparison import Observed, compare, compare_with_itself
from onboard.verify.hf_logits import (
    Reference,
    has_own_code,
    reference_logits,
    release,
    why_no_reference,
)
from onboard.workflow.processes.orphans import exit_with_parent
from onboard.workflow.remote.own_reference import own_logits
from onboard.workflow.run_model.run_log import tell_built, tell_compared, tell_ended, tell_generated
from onboard.workflow.run_model.session import Session


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as told by the command line; the result is the JSON file, failures included."""
    options = _parse(arguments)
    if options.exit_with_parent:
        signal.alarm(RUN_SECONDS.most)  # ends the process, whatever it is at
        threading.Thread(target=exit_with_parent, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("onboard").setLevel(logging.INFO)
    disable_progress_bar()
    result = run(
        resolve_config(options.entry or "", options.root, options.config),
        options.root,
        device=options.device,
        dtype=options.dtype,
        num_hidden_layers=options.layers,
        distinct=options.distinct,
        world_size=options.world_size,
        consent=Consent(options.trust_remote_code, options.unsandboxed),
    )
    options.output.write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
    return 0 if result["status"] == "success" else 1


def run(
    config: RuntimeConfig,
    root: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    num_hidden_layers: int | None = None,
    distinct: bool = False,
    world_size: int | None = None,
    consent: Consent = NO_CONSENT,
) -> dict[str, Any]:
    """Build, generate and compare with transformers, or with own code that there is consent to;
    return what happened, with `status` and `error`.

    With `distinct` texts have no token twice where they are compared.
    `device` and `dtype` other than "auto" override the config for this run; `num_hidden_layers`
    makes it a reduced run; `world_size` ranks run it, None: as configured.
    """
    facts: list[str] = []
    result: dict[str, Any] = {"status": "compile_error", "error": None, "facts": facts}
    try:
        config = _adapted(
            config, facts, device=device, dtype=dtype, num_hidden_layers=num_hidden_layers
        )
        session = partial(Session.start, config, root, distinct, world_size)
        observed, context, notes = _ours(session, result)
        release()
        result |= _judge(observed, context, notes, facts, consent)
        result["status"] = "bad_generation" if result["error"] else "success"
    except NotFiniteError as error:
        result |= {"status": "bad_generation", "error": error.message}
    except (
        Exception
    ) as error:  # whatever a model, a kernel or a library raises is this run's result
        traceback.print_exc()
        result["error"] = _one_line(error)
    tell_ended(result)
    device_type = result.get("settings", {}).get("device", "cpu")
    return {"peak_memory_bytes": peak_memory(device_type)} | result


def _ours(
    start: Callable[[], Session], result: dict[str, Any]
) -> tuple[Observed, TransformContext, list[str]]:
    """Build, generate and record logits, and add to the result; nothing of the model is left when
    this returns.
    """
    with closing((session := start()).llm):
        return _observed(session, result)


def _observed(
    session: Session, result: dict[str, Any]
) -> tuple[Observed, TransformContext, list[str]]:
    result |= {"settings": session.settings(), "status": "runtime_error"}
    result["transforms"] = [asdict(entry) for entry in session.llm.engine.history]
    tell_built(result["settings"], result["transforms"])
    result |= session.generate(result["facts"])
    result["peak_memory_bytes"] = peak_memory(session.context.device.type)
    tell_generated(result)
    observed = session.observe()
    drafts = session.llm.stats.draft_line()
    result["facts"] += [*session.llm.engine.facts, *([f"drafts: {drafts}"] if drafts else [])]
    session.context.history.extend(session.llm.engine.history)  # what transformers is to do, too
    return observed, session.context, session.notes


def _judge(
    observed: Observed,
    context: TransformContext,
    notes: list[str],
    facts: list[str],
    consent: Consent,
) -> dict[str, Any]:
    """Compare what was computed with transformers; `error` says what is wrong, if anything."""
    found: dict[str, Any] = {"finite": observed.finite, "comparison": None, "text": None}
    if not observed.finite:
        return found | {"error": "the logits are not finite"}
    reference = _reference(observed, context, consent)
    if isinstance(reference, str):
        facts.append(f"not compared with another implementation: {reference}")
        comparison = compare_with_itself(observed, context.dtype, reference)
    else:
        comparison = compare(observed, reference, context.dtype, notes)
    facts += comparison.facts
    found |= {
        "comparison": comparison.as_dict(),
        "text": asdict(comparison.text),
        "error": comparison.problem,
    }
    tell_compared(found["comparison"], found["text"])
    return found


def _reference(observed: Observed, context: TransformContext, consent: Consent) -> Reference | str:
    """Return the logits that a run is measured against, or why there are none."""
    asked = [passage.asked for passage in observed.passages]
    if reason := why_no_reference(context):
        return reason
    if not has_own_code(context):
        return reference_logits(context, asked)
    if not consent.code:
        return "the model's own code is run with --trust-remote-code alone"
    try:
        return own_logits(context, asked, unsandboxed=consent.unsandboxed)
    except OnboardError as error:  # the walls, memory or time: what ran is no worse for that
        return f"the model's own code cannot run beside it: {error.message}"


def peak_memory(device_type: str) -> int:
    """Return the most bytes that were in use: on the GPU when the run was there, else resident in
    this process.
    """
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _adapted(
    config: RuntimeConfig,
    facts: list[str],
    *,
    device: str,
    dtype: str,
    num_hidden_layers: int | None,
) -> RuntimeConfig:
    """Return the config with this run's overrides; what departs from the file is a fact."""
    changes: dict[str, Any] = {}
    for name, value in (("device", device), ("dtype", dtype)):
        if value not in ("auto", getattr(config, name)):
            changes[name] = value
            if getattr(config, name) != "auto":
                facts.append(
                    f"{name} is {value} for this run; the config says {getattr(config, name)}"
                )
    if num_hidden_layers is not None:
        changes["model_kwargs"] = config.model_kwargs | {"num_hidden_layers": num_hidden_layers}
    return RuntimeConfig.model_validate(config.model_dump(exclude_unset=True) | changes)


def _one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, OnboardError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m onboard.workflow.run_model.run_model", description=__doc__
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--entry", help="the model's name in the registry, whose composed config it runs with"
    )
    what.add_argument("--config", type=Path, help="a standalone config, alone")
    parser.add_argument(
        "--root", type=Path, required=True, help="where the generated model file is looked up first"
    )
    parser.add_argument("--output", type=Path, required=True, help="where the result goes, as JSON")
    parser.add_argument("--device", default="auto", help="override of the config's device")
    parser.add_argument("--dtype", default="auto", help="override of the config's dtype")
    parser.add_argument("--layers", type=int, default=None, help="build only this many layers")
    parser.add_argument("--world-size", type=int, default=None, help="ranks, else as configured")
    parser.add_argument(
        "--distinct", action="store_true", help="compare texts in which no token comes twice"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="compare with the repository's own class, which is run in its sandbox",
    )
    parser.add_argument(
        "--unsandboxed", action="store_true", help="even where the system lacks walls around it"
    )
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when standard input is closed"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
