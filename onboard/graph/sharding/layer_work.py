"""The ops that do the work of a layer: the letters of their dimensions, and which is cut first.

Where shares begin: each of these is cut by its heads, channels or intermediate entries, and what
is around it follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from onboard.graph.fx import arguments
from onboard.graph.sharding.signatures import Signature, operands, ops, shape, signature_of


@dataclass(frozen=True)
class Mixer:
    """What is said of an op that does a layer's work."""

    letters: Mapping[str, str]
    """Argument -> the letters of its dimensions."""
    output: str
    layer_type: str
    seed: str = "h"
    """The letter that is cut."""
    called: str = "heads"
    """What its entries are, for messages."""


_ATTENTION = {"query": "..h.", "key": "..h.", "value": "..h.", "sinks": "h"}
_LATENT = {"q_nope": "..h.", "q_pe": "..h.", "kv_b_proj_weight": "h."}
_HEADS = {"q": "..h.", "k": "..h.", "v": "..h."}

_MIXERS: dict[Any, Mixer] = {}


def _does_work(op: Any, said: Mixer) -> None:
    """Register what is said of an op."""
    _MIXERS[op] = said


_does_work(
    ops.torch_attention,
    Mixer(_ATTENTION | {"attn_mask": ".h..", "alibi_slopes": "h"}, "..h.", "mha"),
)
_does_work(ops.torch_relative_attention, Mixer(_ATTENTION | {"relative": "..h."}, "..h.", "mha"))
_does_work(ops.torch_dynamic_mask_attention, Mixer(_ATTENTION | {"key_bias": "..h"}, "..h.", "mha"))
_does_work(ops.torch_sparse_attention, Mixer(_ATTENTION, "..h.", "mha"))
_does_work(ops.torch_compressed_attention, Mixer({"query": "..h.", "sinks": "h"}, "..h.", "mla"))
_does_work(ops.torch_mla, Mixer(_LATENT, "..h.", "mla"))
_does_work(ops.torch_sparse_mla, Mixer(_LATENT | {"sinks": "h"}, "..h.", "mla"))
_does_work(ops.torch_gated_delta_rule, Mixer(_HEADS | {"g": "..h", "beta": "..h"}, "..h.", "delta"))
_does_work(ops.torch_delta_rule, Mixer(_HEADS | {"beta": "..h"}, "..h.", "delta"))
_does_work(ops.torch_kda, Mixer(_HEADS | {"g": "..h.", "beta": "..h"}, "..h.", "delta"))
_does_work(
    ops.torch_dplr_delta_rule,
    Mixer(_HEADS | {"a": "..h.", "b": "..h.", "g": "..h."}, "..h.", "delta"),
)
_does_work(ops.torch_lightning_attention, Mixer(_HEADS | {"slopes": "h"}, "..h.", "mha"))
_does_work(
    ops.torch_gated_linear_attention, Mixer(_HEADS | {"g": "..h.", "first": "h."}, "..h.", "mha")
)
_does_work(ops.torch_mlstm, Mixer(_HEADS | {"igate": "..h", "fgate": "..h"}, "..h.", "ssm"))
_does_work(
    ops.torch_ssm,
    Mixer(
        {
            **{"hidden_states": "..h.", "A": "h", "B": "..h.", "C": "..h."},
            **{"D": "h", "dt": "..h", "dt_bias": "h"},
        },
        "..h.",
        "ssm",
    ),
)
_does_work(
    ops.torch_selective_scan,
    Mixer(
        {
            **{"hidden_states": "..c", "dt": "..c", "A": "c."},
            **{"D": "c", "z": "..c", "dt_bias": "c"},
        },
        "..c",
        "ssm",
        seed="c",
        called="channels",
    ),
)
_does_work(
    ops.torch_linear_recurrence,
    Mixer({"x": "..c", "decay": "..c"}, "..c", "ssm", seed="c", called="channels"),
)
_does_work(
    ops.torch_wkv,
    Mixer(
        {"key": "..c", "value": "..c", "time_decay": "c", "time_first": "c"},
        "..c",
        "ssm",
        seed="c",
        called="channels",
    ),
)
_does_work(
    ops.torch_swiglu_mlp,
    Mixer(
        {
            **{"gate_weight": "c.", "up_weight": "c.", "down_weight": ".c"},
            **{"gate_bias": "c", "up_bias": "c", "down_bias": "."},
        },
        "",
        "mlp",
        seed="c",
        called="channels",
    ),
)
_does_work(
    ops.torch_moe,
    Mixer(
        {
            **{"w1_weight": "c.", "w3_weight": "c.", "w2_weight": ".c"},
            **{"w1_bias": "c", "w3_bias": "c", "w2_bias": "."},
        },
        "",
        "moe",
        seed="c",
        called="channels of an expert",
    ),
)
_ONCE = frozenset(["down_bias", "w2_bias"])


def mixer(node: Node) -> Mixer | None:
    """Return what is said of the op that a node calls, None for one that does not do the work of a
    layer.
    """
    return _MIXERS.get(getattr(node.target, "overloadpacket", None))


@signature_of(*_MIXERS)
def mixer_signature(node: Node) -> Signature | None:
    """The letters of the table; attention in the other layout has heads in front of the sequence.

    Masks may lack dimensions in front, and sinks may be those of each token.
    """
    found = _MIXERS[node.target.overloadpacket]  # type: ignore[union-attr]
    letters, output = dict(found.letters), found.output or "." * len(shape(node))
    if arguments(node).get("layout") == "bnsd":
        letters |= dict.fromkeys(("query", "key", "value"), ".h..")
        output = ".h.."
    for name in ("attn_mask", "sinks"):
        if isinstance(value := arguments(node).get(name), Node):
            letters[name] = f"....{letters.get(name, '')}"[-len(shape(value)) :]
    return Signature(operands(node, **letters), (output,), once=_ONCE)


@signature_of(ops.torch_token_shift)
def token_shift(node: Node) -> Signature | None:
    """Channel by channel."""
    return Signature(operands(node, x="..c"), ("..c",))
