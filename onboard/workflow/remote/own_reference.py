"""What a run of a model with own code is measured against: the logits of the repository's class,
computed in its sandbox.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch

from onboard.errors import ConsentRequiredError, OnboardError
from onboard.gpu import gigabytes, system_memory
from onboard.graph.context import TransformContext
from onboard.graph.pipeline_stages.stage_of_nodes import OF_LIST
from onboard.graph.weight_load.quantised_folder import open_checkpoint
from onboard.graph.weight_load.safetensors_folder import Checkpoint, TensorMeta
from onboard.graph.weight_load.stored_places import open_files
from onboard.hub import read_config
from onboard.untrusted.consent import Consent
from onboard.verify.hf_logits import Asked, Reference, References, has_own_code, reference_logits
from onboard.verify.quantised_inputs import quantised_inputs
from onboard.workflow.remote.code_session import LIMITS, Session, agree
from onboard.workflow.remote.handed import small_files
from onboard.workflow.remote.messages import REPLIES
from onboard.workflow.remote.sandbox import Limits

_MEMORY_SHARE = 0.8
_SECONDS = 3600.0
"""Two passes over a model that fits in memory, on its processor."""


def own_logits(
    context: TransformContext, asked: Sequence[Asked], *, unsandboxed: bool
) -> Reference:
    """Run the repository's class of a run's checkpoint on each sequence by itself, without cache.

    Raises:
        OnboardError: it cannot be run here, or fails.
    """
    passes = _written(context, asked, unsandboxed, in_float64=False)
    return Reference(
        passes[-1],
        passes[0] if len(passes) == 2 else None,
        "whole",
        "the repository's own code",
        lambda: _written(context, asked, unsandboxed, in_float64=True)[0],
    )


def references_by(consent: Consent) -> References:
    """Return what computes the logits that a model is compared with: transformers, or the repository's
    class where the model's code is its own.
    """

    def references(context: TransformContext, asked: Sequence[Asked]) -> Reference:
        if not has_own_code(context):
            return reference_logits(context, asked)
        if not consent.code:
            raise ConsentRequiredError(
                "what this model is compared with is Python code of its repository, which would be run",
                hint=f"Read the code in {context.factory.checkpoint}; then run again with "
                "--trust-remote-code",
            )
        return own_logits(context, asked, unsandboxed=consent.unsandboxed)

    return references


def _written(
    context: TransformContext, asked: Sequence[Asked], unsandboxed: bool, *, in_float64: bool
) -> list[list[torch.Tensor]]:
    """Return the rows of all texts of each pass: in float64, or in the run's dtype and in
    float32.
    """
    checkpoint = open_checkpoint(context.factory.checkpoint)
    names = _wanted(checkpoint, context)
    folder, dtype = context.factory.checkpoint, torch.float64 if in_float64 else torch.float32
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        limits = _limits([checkpoint.names()[name] for name in names], dtype)
        files, stored = open_files(checkpoint, stack, names)
        session = stack.enter_context(_session(limits, [output.fileno(), *files]))
        agree(session, unsandboxed=unsandboxed)
        session.give(read_config(folder), small_files(folder))
        order = {**_order(context, asked, stored), "in_float64": in_float64}
        wanted = {"order": order, "output": output.fileno()}
        reply = session.ask("logits", wanted, REPLIES["logits"], own_code=True)
        if reply.error is not None:
            raise OnboardError(reply.error, hint=reply.hint)
        passes = 1 if context.dtype == torch.float32 or in_float64 else 2
        counts = [len(each.rows) for each in asked]
        rows = _read(output, passes, sum(counts), reply.result or 0, dtype)
    return [list(each.split(counts)) for each in rows]


def _order(
    context: TransformContext, asked: Sequence[Asked], stored: dict[str, Any]
) -> dict[str, Any]:
    return {
        "asked": [[each.ids, each.rows] for each in asked],
        "stored": stored,
        "dtype": str(context.dtype).removeprefix("torch."),
        "overrides": context.factory.model_kwargs,
        "inputs": {
            name: asdict(each)
            for name, each in quantised_inputs(context).items()
            if name in stored and context.dtype != torch.float32
        },
    }


def _wanted(checkpoint: Checkpoint, context: TransformContext) -> list[str]:
    """Return the tensors that the class may read: in a run with fewer layers none of those that are
    left out.
    """
    names, kept = list(checkpoint.names()), context.factory.model_kwargs.get("num_hidden_layers")
    if kept is None:
        return names
    ours = _lists(context.factory.build_model().state_dict())
    layers = {path: indices for path, indices in ours.items() if len(indices) == kept}
    return [
        name
        for name in names
        if not (found := OF_LIST.match(name))
        or found[1] not in layers
        or int(found[2]) in layers[found[1]]
    ]


def _lists(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the outermost lists of modules that tensors are of, and the indices in them."""
    lists: dict[str, set[int]] = defaultdict(set)
    for found in filter(None, map(OF_LIST.match, names)):
        lists[found[1]].add(int(found[2]))
    return lists


def _limits(tensors: Iterable[TensorMeta], dtype: torch.dtype) -> Limits:
    """Return the limits of a child with memory for these weights in a dtype."""
    needed = dtype.itemsize * sum(math.prod(meta.shape) for meta in tensors)
    if needed > _MEMORY_SHARE * system_memory().free:
        named = str(dtype).removeprefix("torch.")
        raise OnboardError(f"its weights need {gigabytes(needed)} GB of memory in {named}")
    wide = LIMITS.gibibytes + needed / 2**30
    return LIMITS.model_copy(update={"gibibytes": wide, "seconds": _SECONDS})


@contextmanager
def _session(limits: Limits, files: Sequence[int]) -> Iterator[Session]:
    """A child with these files open."""
    session = Session(f"reference {os.getpid()}", limits, files)
    try:
        yield session
    finally:
        session.close()


def _read(
    output: Any, passes: int, count: int, vocabulary: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return what was written: of each pass the rows of all texts, [passes, rows, vocabulary]."""
    size = os.fstat(output.fileno()).st_size
    if vocabulary <= 0 or size != dtype.itemsize * passes * count * vocabulary:
        raise OnboardError(
            "the process that ran the model's code wrote other rows than were asked for",
            hint="Do not trust this model",
        )
    output.seek(0)
    written = torch.frombuffer(bytearray(output.read(size)), dtype=dtype)
    return written.view(passes, count, vocabulary)
