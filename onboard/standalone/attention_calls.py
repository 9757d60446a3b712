"""Can all that a model keeps from token to token be kept by an attention layer of another engine?

The model's own graph says so, exported with a few layers of each kind, as the runtime's is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx

from onboard.config import RuntimeConfig
from onboard.errors import OnboardError
from onboard.graph.assembly.assemble import pipeline_for
from onboard.graph.cache_init.token_mixing import token_mixing
from onboard.graph.fx import arguments, graph_modules, op_name
from onboard.graph.pattern_matcher.patterns import is_number
from onboard.graph.pipeline import Pipeline
from onboard.graph.transform import Stages
from onboard.ops import stateful_ops
from onboard.runtime.build import make_context
from onboard.runtime.limits import PROOF

ATTENTION = "torch_attention"
_HINT = "Export it --to plain, or serve it with onboard"
_NEVER = ("attn_mask", "chunk_size")
"""Arguments of the op that an attention layer with pages has no counterpart for."""
_NUMBERS = ("scale", "sliding_window", "logit_cap")


def refuse_other_mixers(checkpoint: Path, root: Path) -> None:
    """Raise `OnboardError` unless causal attention, by itself, is all through which a token sees
    others.
    """
    for node in (node for gm in _graphs(checkpoint, root) for node in gm.graph.nodes):
        name = op_name(node) if node.op == "call_function" else ""
        if name in stateful_ops():
            raise _refusal(f"{name} has no counterpart")
        if name == ATTENTION:
            refuse_other_attention(arguments(node))


def _graphs(checkpoint: Path, root: Path) -> list[fx.GraphModule]:
    """Return the model's graphs; raise `OnboardError` where tokens are mixed by something that is
    no op of ours.
    """
    runtime = RuntimeConfig(model=str(checkpoint), device="cpu", dtype="float32")
    context = make_context(checkpoint, runtime, root=root, defaults=PROOF)
    transforms = pipeline_for(context, {"export_to_gm": {"complete": False}})
    wanted = (Stages.FACTORY, Stages.EXPORT)
    module = Pipeline([each for each in transforms if each.config.stage in wanted]).run(context)
    graphs = [gm for _, gm in graph_modules(module)]
    for gm in graphs:
        if (mixing := token_mixing(gm, torch.device("cpu"))) is not None:
            raise _refusal(f"{mixing} mixes tokens and has no counterpart")
    return graphs


def refuse_other_attention(given: dict[str, Any]) -> None:
    """Raise `OnboardError` where an attention layer has no counterpart for a call of the op with
    these arguments.
    """
    found = next((name for name in _NEVER if given[name] is not None), None)
    if found is None and given["dropout_p"]:
        found = "dropout_p"
    if found is None and not given["is_causal"]:
        found = "is_causal=False"
    found = found or next(
        (name for name in _NUMBERS if not (given[name] is None or is_number(given[name]))), None
    )
    if found is not None:
        raise _refusal(f"{ATTENTION} with {found} has no counterpart")
    sinks = given["sinks"]
    if sinks is not None and not (sinks.op == "get_attr" and sinks.meta["val"].dim() == 1):
        raise _refusal(f"{ATTENTION} with sinks that are computed has no counterpart")
    key, value = (given[name].meta["val"].shape[-1] for name in ("key", "value"))
    if key != value:
        raise _refusal(
            f"{ATTENTION} with values of {value} numbers a head and keys of {key} has no counterpart"
        )


def _refusal(what: str) -> OnboardError:
    return OnboardError(f"{what} in vLLM's attention layer", hint=_HINT)
