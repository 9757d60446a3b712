"""Checklist, part P: a model file computes with canonical ops, and with nothing that a back end or a cache brings."""

from __future__ import annotations

import ast

from onboard.agents.source import Outcome, Source, dotted, forbid
from onboard.agents.subject import Subject, contract, style
from onboard.ops import canonical_ops

_OPS_OF_KIND = {
    "attention": {"torch_attention", "torch_attention_sdpa", "torch_sparse_attention"},
    "rmsnorm": {"torch_rmsnorm"},
    "layernorm": {"torch_layernorm"},
}
_WRITTEN_OUT = {
    "MultiheadAttention",
    "RMSNorm",
    "apply_rotary_pos_emb",
    "layer_norm",
    "rms_norm",
    "rotate_half",
    "rsqrt",
    "scaled_dot_product_attention",
}
"""Calls that compute what a canonical op is there for."""
_BACK_ENDS = ("triton", "flashinfer", "fla", "trtllm", "cutlass")


def _ops(source: Source, inside: ast.AST | None = None) -> dict[ast.Call, str]:
    """The calls of `torch.ops` and the name after it, for example `onboard.torch_rmsnorm`."""
    calls = source.calls(lambda name: name.startswith("torch.ops."), inside)
    return {call: dotted(call.func).removeprefix("torch.ops.") for call in calls}


def _is_back_end(name: str) -> bool:
    namespace, _, op = name.partition(".")
    return namespace in _BACK_ENDS or op.startswith(tuple(f"{back_end}_" for back_end in _BACK_ENDS))


def _canonical_used(subject: Subject) -> Outcome:
    classes = subject.model.classes()
    missing, used = [], []
    for block in subject.blocks(*_OPS_OF_KIND, "rope"):
        # RoPE is a function in Hugging Face's source: its op may stand in any class.
        node = subject.model.tree if block.kind == "rope" else classes.get(block.class_name)
        wanted = _OPS_OF_KIND.get(block.kind, {str(block.parameters.get("op"))})
        ops = _ops(subject.model, node) if node is not None else {}
        calls = [call for call, name in ops.items() if name.removeprefix("onboard.") in wanted]
        if not calls:
            line = getattr(node, "lineno", 1)
            missing.append(f"{subject.model.path}:{line}: {block.class_name} calls none of {', '.join(sorted(wanted))}")
        used += subject.model.places(calls)
    return Outcome(not missing, missing or used)


def _nothing_written_out(subject: Subject) -> Outcome:
    attention = {block.class_name for block in subject.blocks("attention")}
    found = subject.model.calls(lambda name: name.rpartition(".")[2] in _WRITTEN_OUT)
    for name, node in subject.model.classes().items():
        if name in attention:
            found += subject.model.calls(lambda called: called.rpartition(".")[2] == "softmax", node)
    return forbid(subject.model, found)


def _known_ops(subject: Subject) -> Outcome:
    known = {f"onboard.{op}" for op in canonical_ops()}
    return forbid(
        subject.model,
        [call for call, name in _ops(subject.model).items() if name not in known and not _is_back_end(name)],
    )


def _no_back_end(subject: Subject) -> Outcome:
    return forbid(subject.model, [call for call, name in _ops(subject.model).items() if _is_back_end(name)])


def _no_cache(subject: Subject) -> Outcome:
    # Older code calls tables that it makes once "cached".
    return forbid(subject.model, subject.model.named(r"[Cc]ache(?!d\b)|past_key_value"))


def _no_training(subject: Subject) -> Outcome:
    words = r"[Dd]ropout|^training$|gradient_checkpointing|^labels$|^loss(_function)?$"
    return forbid(subject.model, subject.model.named(words))


def _no_attention_variants(subject: Subject) -> Outcome:
    words = r"flash_att|attn_implementation|ALL_ATTENTION_FUNCTIONS|attention_interface"
    return forbid(subject.model, subject.model.named(words))


def _no_repeat(subject: Subject) -> Outcome:
    repeats = {"repeat_kv", "repeat_interleave", "torch_attention_repeat_kv"}
    return forbid(subject.model, subject.model.calls(lambda name: name.rpartition(".")[2] in repeats))


MODEL_OPS = [
    style("P01", "attention, RoPE and norms call the canonical op", _canonical_used),
    style("P02", "nothing that a canonical op does is written out", _nothing_written_out),
    contract("P03", "each torch.ops call is a canonical op", _known_ops),
    contract("P04", "no back end's op is called", _no_back_end),
    style("P05", "there is no key-value cache", _no_cache),
    style("P06", "there is no training path", _no_training),
    style("P07", "there are no attention variants to choose from", _no_attention_variants),
    style("P08", "keys and values are not repeated for grouped queries", _no_repeat),
]
