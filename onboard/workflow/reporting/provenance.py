"""What somebody needs to repeat a run: versions, machine, commits and the command."""

from __future__ import annotations

import os
import platform
import shlex
from pathlib import Path
from typing import Any

from onboard.content import CONTENT_ROOT
from onboard.git import Checkout, commit_of
from onboard.gpu import device_memory, gigabytes, processor
from onboard.workflow.phase import RunContext
from onboard.workflow.registry_results import now
from onboard.workflow.run_state import current_versions


def provenance(context: RunContext) -> dict[str, Any]:
    """Return versions, host, commits (empty where there is no checkout) and command of a run, as
    JSON-able data.
    """
    checkout = Checkout.find(context.root)
    return {
        "versions": current_versions() | {"Python": platform.python_version()},
        "host": host(),
        "source_commit": commit_of(CONTENT_ROOT),
        "root_commit": checkout.head if checkout else "",
        "onboard": onboard_command(context),
    }


def log_head(made: dict[str, Any]) -> str:
    """Return the first lines of a run's log: when, with what, where and how it is made."""
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    commits = {"onboard": made["source_commit"], "the root": made["root_commit"]}
    found = [f"commit of {name}: {commit}" for name, commit in commits.items() if commit]
    return "".join(
        f"{line}\n" for line in (f"{now()} $ {made['onboard']}", versions, made["host"], *found)
    )


def host() -> str:
    """Return the processor of this machine, how many of its cores this process may use, and the
    memory.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory = f"{gigabytes(device_memory('cpu').total)} GB of memory"
    return (
        f"{processor()}, {cores} {'core' if cores == 1 else 'cores'}, {memory}, {platform.system()}"
    )


def onboard_command(context: RunContext) -> str:
    """Return the command that repeats the whole road, from the root; of a Hub's model the commit
    that was fetched.
    """
    options, revision = context.options, context.source.revision or context.options.revision
    values = {"--revision": revision, "--device": options.device, "--dtype": options.dtype}
    words = [
        word
        for name, value in values.items()
        if value not in (None, "auto")
        for word in (name, str(value))
    ]
    switches = {
        "--trust-remote-code": options.trust_remote_code,
        "--unsandboxed": options.unsandboxed,
        "--strict": options.strict,
        "--yes": options.yes,
    }
    words += [name for name, is_on in switches.items() if is_on]
    return shlex.join(["onboard", _place(context), "--root", ".", *words])


def _place(context: RunContext) -> str:
    """Return the model's id, or its folder from the root; where one outside it lies is each
    reader's own matter.
    """
    path = Path(context.model)
    if not path.is_absolute():
        return context.model
    return (
        f"./{context.relative(path)}"
        if path.is_relative_to(context.root)
        else f"path/to/{path.name}"
    )
