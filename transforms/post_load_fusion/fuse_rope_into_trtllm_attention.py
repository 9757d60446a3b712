"""Attention that rotates its queries and keys itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import fx

from onboard.graph.backends import NO_TRITON, choose_backend
from onboard.graph.context import TransformContext
from onboard.graph.fx import arguments, is_op, nodes_of, replace_with
from onboard.graph.new_nodes import insert_call
from onboard.graph.post_load_fusion.rotated_attention import (
    Rotated,
    is_norm,
    norms_before,
    rotation_before,
)
from onboard.graph.post_load_fusion.slices import Slice, slice_of, width
from onboard.graph.transform import (
    GraphTransform,
    TransformConfig,
    TransformInfo,
    register_transform,
    skipped,
)
from onboard.ops.library import declared

_ops, aten = torch.ops.onboard, torch.ops.aten
_VIEWS = (aten.view, aten.reshape, aten.unflatten)
_NEEDED = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "layout": "bsnd"}


class FuseRopeIntoTrtllmAttentionConfig(TransformConfig):
    """How queries, keys and values are handed over."""

    fuse_qkv_passthrough: bool = True
    """Where they are one product, it is handed over as it is, and attention takes it apart."""
    where: Literal["everywhere", "faster"] = "everywhere"
    """With "faster", only where kernels rotate, and norms before the rotation are taken in with it, or
    there are none: its own kernel takes in those that are left.
    """


@register_transform("fuse_rope_into_trtllm_attention")
class FuseRopeIntoTrtllmAttention(GraphTransform[FuseRopeIntoTrtllmAttentionConfig]):
    """Let attention read queries and keys from before their rotation, and from before norms of their
    heads: on every back end here, the reference's among them.
    """

    config_class = FuseRopeIntoTrtllmAttentionConfig

    def rewrite(self, gm: fx.GraphModule, context: TransformContext) -> int | TransformInfo:
        """Count one match for each attention."""
        faster = self.config.where == "faster"
        if faster and choose_backend("auto", context, self.key) != "triton":
            return skipped(NO_TRITON)
        attentions, matches, joined = nodes_of(gm, _ops.torch_attention), 0, 0
        for attention in attentions:
            values = arguments(attention)
            found = rotation_before(attention, values["query"], values["key"])
            if found is None or not _is_plain(values):
                continue
            given = _before(gm, found)
            if faster and is_norm(given["query"]):
                continue
            matches += 1
            joined += self._fuse(gm, attention, found, {**values, **given})
        self._tell(context, len(attentions), matches, joined)
        return matches

    def _fuse(
        self, gm: fx.GraphModule, attention: fx.Node, found: Rotated, values: Mapping[str, Any]
    ) -> bool:
        """Replace an attention; return whether it reads one product."""
        parts = [values[name] for name in ("query", "key", "value")]
        product = _product(parts) if self.config.fuse_qkv_passthrough else None
        heads = None
        if product is not None:
            heads = [*(part.meta["val"].shape[2] for part in parts[:2]), _dim(parts[0])]
            parts = [product] * 3
        op = _ops.torch_rope_attention.default
        cos, sin, turns = found.tables(gm)
        given = {"cos": cos, "sin": sin, "turns": turns, "heads": heads}
        given |= dict(zip(("query", "key", "value"), parts, strict=True))
        args = [{**values, **given}[each.name] for each in op._schema.arguments]
        replace_with(attention, insert_call(gm, attention, op, *args, like=attention))
        return product is not None

    def _tell(self, context: TransformContext, attentions: int, matches: int, joined: int) -> None:
        if 0 < matches < attentions:
            left = attentions - matches
            context.facts.append(
                f"{self.key}: {left} of {attentions} attentions do not rotate themselves"
            )
        if self.config.fuse_qkv_passthrough and joined < matches:
            apart = matches - joined
            context.facts.append(
                f"{self.key}: {apart} of {matches} attentions read queries, keys and values apart"
            )


def _before(gm: fx.GraphModule, found: Rotated) -> dict[str, Any]:
    """Return queries and keys before their rotation, and before norms that attention can take in."""
    halves = declared(found.rotation.target).fused_form == "rope_cached"
    norms = norms_before(gm, found.query, found.key) if halves else None
    if norms is None:
        given = {"query": found.query, "key": found.key}
        return given | {"q_norm": None, "k_norm": None, "norm_eps": 0.0}
    names = ("query", "key", "q_norm", "k_norm", "norm_eps")
    return dict(zip(names, norms, strict=True))


def _is_plain(values: Mapping[str, Any]) -> bool:
    """Tell whether an attention is the causal one of a known number of heads."""
    tensors = [values[name].meta["val"] for name in ("query", "key", "value")]
    sinks = values["sinks"]
    return (
        all(values[name] == wanted for name, wanted in _NEEDED.items())
        and all(isinstance(size, int) for value in tensors for size in value.shape[2:])
        and (sinks is None or sinks.meta["val"].dim() == 1)
    )


def _product(parts: list[fx.Node]) -> fx.Node | None:
    """Return the tensor whose last dimension has queries, keys and values side by side, and no
    more, if they are views of one.
    """
    flat = [part.args[0] if is_op(part, *_VIEWS) else None for part in parts]
    slices = [each for node in flat if (each := slice_of(node)) is not None]
    if len(slices) < len(parts) or any(map(_is_regrouped, parts, slices)):
        return None
    wholes = {each.whole for each in slices}
    ends = [0, *(each.stop for each in slices)]
    follow = [each.start for each in slices] == ends[:-1] and ends[-1] == width(slices[0].whole)
    return slices[0].whole if len(wholes) == 1 and follow else None


def _is_regrouped(part: fx.Node, taken: Slice) -> bool:
    """Tell whether a view has other outer dimensions than what it is of."""
    value = part.meta["val"]
    same = value.shape[:2] == taken.whole.meta["val"].shape[:-1]
    return not (same and value.shape[2] * value.shape[3] == taken.stop - taken.start)


def _dim(query: fx.Node) -> int:
    return int(query.meta["val"].shape[-1])
