"""Checklist, part P: a model file computes with canonical ops, and with nothing that a back end or
a cache brings.
"""

from __future__ import annotations

import ast
import re

from onboard.ops import attention_ops, canonical_ops
from onboard.review.checklist import Subject, contract, style
from onboard.review.dataflow import Dataflow
from onboard.review.python_source import Outcome, Source, definitions, dotted, forbid
from onboard.review.written_out import Spot, written_out

_OPS_OF_KIND = {
    "attention": attention_ops(),
    "rmsnorm": {"torch_rmsnorm"},
    "layernorm": {"torch_layernorm"},
}
_ROTATIONS = {"apply_rotary_pos_emb", "rotate_half"}
"""Functions that compute what a canonical op of RoPE is there for."""
_REPEATS = {"repeat_interleave"}
_BACK_ENDS = ("triton", "flashinfer", "fla", "trtllm", "cutlass")


def _ops(source: Source, inside: ast.AST | None = None) -> dict[ast.Attribute, str]:
    """Where an op is named, called there or kept to be called, and what comes after `torch.ops`, for
    example `onboard.torch_rmsnorm`.
    """
    owners = {id(node.value) for node in source.all(ast.Attribute, inside)}
    named = [
        node
        for node in source.all(ast.Attribute, inside)
        if id(node) not in owners and dotted(node).startswith("torch.ops.")
    ]
    return {node: dotted(node).removeprefix("torch.ops.") for node in named}


def _is_back_end(name: str) -> bool:
    namespace, _, op = name.partition(".")
    return namespace in _BACK_ENDS or op.startswith(
        tuple(f"{back_end}_" for back_end in _BACK_ENDS)
    )


def _canonical_used(subject: Subject) -> Outcome:
    classes = subject.model.classes()
    missing, used = [], []
    for block in subject.blocks(*_OPS_OF_KIND, "rope"):
        # RoPE is a function in Hugging Face's source: its op may stand in any class.
        node = subject.model.tree if block.kind == "rope" else classes.get(block.class_name)
        wanted = _OPS_OF_KIND.get(block.kind, {getattr(block.parameters, "op", "")})
        ops = _ops(subject.model, node) if node is not None else {}
        named = [node for node, name in ops.items() if name.removeprefix("onboard.") in wanted]
        if not named:
            line = getattr(node, "lineno", 1)
            missing.append(
                f"{subject.model.path}:{line}: {block.class_name} calls none of {', '.join(sorted(wanted))}"
            )
        used += subject.model.places(named)
    return Outcome(not missing, missing or used)


def _nothing_written_out(subject: Subject) -> Outcome:
    """Of what the generator itself wrote, and proved: where it had no op, or did not see that there
    is one.
    """
    found = [spot.node for spot in _spots(subject) if not spot.names & subject.edited]
    found += subject.model.calls(lambda name: name.rpartition(".")[2] in _ROTATIONS)
    return forbid(subject.model, found)


def _nothing_written_out_by_hand(subject: Subject) -> Outcome:
    """Transforms see ops: attention that is none has no cache, and a norm that is none is never
    fused.
    """
    return forbid(
        subject.model, [spot.node for spot in _spots(subject) if spot.names & subject.edited]
    )


def _spots(subject: Subject) -> list[Spot]:
    """Where something is written out; a softmax in what the spec knows as attention is so without
    further signs.
    """
    attention = {block.class_name for block in subject.blocks("attention")}
    bodies = {
        name: node
        for name, node in definitions(subject.model).items()
        if name.partition(".")[0] in attention
    }
    softmaxes = [
        Spot(call, frozenset({name}))
        for name, node in bodies.items()
        for call in subject.model.calls(lambda called: called.rpartition(".")[2] == "softmax", node)
    ]
    return [*written_out(subject.model), *softmaxes]


def _known_ops(subject: Subject) -> Outcome:
    known = {f"onboard.{op}" for op in canonical_ops()}
    return forbid(
        subject.model,
        [
            node
            for node, name in _ops(subject.model).items()
            if name not in known and not _is_back_end(name)
        ],
    )


def _no_back_end(subject: Subject) -> Outcome:
    return forbid(
        subject.model, [node for node, name in _ops(subject.model).items() if _is_back_end(name)]
    )


def _no_cache(subject: Subject) -> Outcome:
    # Older code calls tables that it makes once "cached"; what a config calls its sizes is the
    # checkpoint's affair.
    found = subject.model.named(r"[Cc]ache(?!d\b)|past_key_value")
    return forbid(
        subject.model, [node for node in found if not re.match(r"(self\.)?config\.", dotted(node))]
    )


def _no_training(subject: Subject) -> Outcome:
    words = r"[Dd]ropout|^training$|gradient_checkpointing|^labels$|^loss(_function)?$"
    return forbid(subject.model, subject.model.named(words))


def _no_attention_variants(subject: Subject) -> Outcome:
    words = r"flash_att|attn_implementation|ALL_ATTENTION_FUNCTIONS|attention_interface"
    return forbid(subject.model, subject.model.named(words))


def _no_repeat(subject: Subject) -> Outcome:
    """What is repeated for something else, like tables of RoPE for pairs of channels, is no key and
    no value.
    """
    found: list[ast.AST] = []
    for function in subject.model.all(ast.FunctionDef):
        flow = Dataflow(function)
        attention = [
            call
            for call in subject.model.calls(lambda name: name.startswith("torch.ops."), function)
            if "attention" in dotted(call.func) and len(call.args) > 2
        ]
        into = {name for call in attention for arg in call.args[1:3] for name in flow.sources(arg)}
        repeats = subject.model.calls(lambda name: _last(name) in _REPEATS, function)
        found += [call for call in repeats if dotted(call.func) in into]
    named = subject.model.calls(
        lambda name: _last(name) in ("repeat_kv", "torch_attention_repeat_kv")
    )
    return forbid(subject.model, [*found, *named])


def _last(name: str) -> str:
    return name.rpartition(".")[2]


MODEL_OPS = [
    style("P01", "attention, RoPE and norms call the canonical op", _canonical_used),
    style(
        "P02", "nothing that a canonical op does is generated as written out", _nothing_written_out
    ),
    contract("P03", "each torch.ops call is a canonical op", _known_ops),
    contract("P04", "no back end's op is called", _no_back_end),
    style("P05", "there is no key-value cache", _no_cache),
    style("P06", "there is no training path", _no_training),
    style("P07", "there are no attention variants to choose from", _no_attention_variants),
    style("P08", "keys and values are not repeated for grouped queries", _no_repeat),
    contract("P09", "no edit writes out attention or a norm", _nothing_written_out_by_hand),
]
