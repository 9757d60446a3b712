"""What the transforms that recognise and rewrite attention share."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import fx

import onboard.ops  # noqa: F401  (registers the canonical ops)
from onboard.graph.fx import arguments, call
from onboard.graph.pattern_matcher.masks import mask_form

ATTENTION = torch.ops.onboard.torch_attention.default


class MaskReader:
    """Turns the mask arguments of an attention call into the simplest equivalent; remembers masks
    that layers share.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.known: dict[fx.Node, dict[str, Any]] = {}
        self.hiding: dict[fx.Node, dict[str, Any] | None] = {}

    def read(self, mask: fx.Node | None, *, is_causal: bool = False) -> dict[str, Any]:
        """Return `attn_mask`, `is_causal`, `sliding_window` and `chunk_size` for `torch_attention`.

        A mask that is not recognised stays what it is.
        """
        if mask is None or is_causal:
            return {
                "attn_mask": mask,
                "is_causal": is_causal,
                "sliding_window": None,
                "chunk_size": None,
            }
        if mask not in self.known:
            form = mask_form(self.gm, mask)
            self.known[mask] = {
                "attn_mask": mask if form is None else None,
                "is_causal": form is not None and form.is_causal,
                "sliding_window": form.sliding_window if form is not None else None,
                "chunk_size": form.chunk_size if form is not None else None,
            }
        return self.known[mask]

    def read_hidden(self, hidden: fx.Node) -> dict[str, Any] | None:
        """Return the same of a mask that is true of the keys that a query does not see; None where
        it is not recognised.
        """
        if hidden not in self.hiding:
            form = mask_form(self.gm, hidden, hides=True)
            self.hiding[hidden] = None if form is None else {"attn_mask": None, **asdict(form)}
        return self.hiding[hidden]


def insert_attention(
    gm: fx.GraphModule, node: fx.Node, inputs: tuple[fx.Node, ...], **options: Any
) -> fx.Node:
    """Insert `torch_attention` before `node`: query, key and value in `inputs`, the other arguments
    by name.
    """
    rest = ATTENTION._schema.arguments[len(inputs) :]
    values = [options.get(argument.name, argument.default_value) for argument in rest]
    return call(gm, node, ATTENTION, *inputs, *values, like=node)


def rewrite_attention(gm: fx.GraphModule, node: fx.Node, **changes: Any) -> fx.Node:
    """Insert a copy of the attention call `node` before it with some arguments changed, and return
    the copy.
    """
    values = {**arguments(node), **changes}
    return call(gm, node, ATTENTION, *values.values(), like=node)
