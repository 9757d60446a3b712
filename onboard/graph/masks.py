"""Which keys an attention mask lets each query see: found out by computing the mask, not by reading its graph.

transformers builds masks in many ways, and changes them between versions. What counts is the outcome: the nodes that
the mask is computed from are run on small inputs, and the result is compared with a causal triangle and with bands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from onboard.graph.fx import ancestors, attr_tensor

_BATCH = 2
_LENGTHS = (24, 37)
_SMALL_WINDOW = 5
_LONGEST_TABLE = 16384
_LARGEST_LITERAL = 2**31  # larger integers stand for "to the end" in slices


@dataclass(frozen=True)
class MaskForm:
    """A mask that attention can compute by itself."""

    is_causal: bool
    sliding_window: int | None = None

    def at(self, length: int) -> MaskForm:
        """Return the form that shows in a sequence of `length`: a longer window is none."""
        window = self.sliding_window
        return MaskForm(self.is_causal, window if window is not None and window < length else None)


def mask_form(gm: fx.GraphModule, mask: fx.Node) -> MaskForm | None:
    """Return what a mask [batch, heads or 1, sequence, sequence] amounts to, None when it is none of the known forms.

    A window longer than the probes is found through its literal: every integer in the mask's graph is replaced by a
    small one in turn, and the window must follow it. A mask that is cut out of a table is looked at in its full size.
    """
    longest = _table_length(gm, mask)
    if longest > _LONGEST_TABLE:
        return None
    short, form = (_form(_evaluate(gm, mask, length, {}), length) for length in (_LENGTHS[0], longest))
    if form is None or short != form.at(_LENGTHS[0]):
        return None
    if form != MaskForm(True):
        return form
    windows = set()
    for literal in _literals(mask):
        form = _form(_evaluate(gm, mask, _LENGTHS[0], {literal: _SMALL_WINDOW}), _LENGTHS[0])
        if form is None or not form.is_causal:
            return None
        if form.sliding_window is not None:
            windows.add(literal + form.sliding_window - _SMALL_WINDOW)
    return MaskForm(True, min(windows, default=None))


def _table_length(gm: fx.GraphModule, mask: fx.Node) -> int:
    """Return the size of the largest square table that a mask is cut out of, or that of the longer probe."""
    leaves = [attr_tensor(gm, node) for node in ancestors([mask]) if node.op == "get_attr"]
    tables = [leaf for leaf in leaves if leaf is not None and leaf.dim() >= 2 and leaf.shape[-1] == leaf.shape[-2]]
    return max([_LENGTHS[-1], *(table.shape[-1] for table in tables)])


def _form(mask: torch.Tensor | None, length: int) -> MaskForm | None:
    allowed = _allowed(mask, length)
    if allowed is None:
        return None
    allowed = allowed.expand(_BATCH, allowed.shape[1], length, length)
    if bool(allowed.all()):
        return MaskForm(False)
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    window = int(allowed[0, 0, -1].sum())
    if not torch.equal(allowed, ((distance >= 0) & (distance < window)).expand_as(allowed)):
        return None
    return MaskForm(True, window if window < length else None)


def _allowed(mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Return a mask as bool, None when it is no mask: a bias, or of another shape."""
    if mask is None or mask.dim() != 4 or mask.shape[0] not in (1, _BATCH) or mask.shape[-1] != length:
        return None
    if mask.dtype == torch.bool:
        return mask.cpu()
    allowed, forbidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    return allowed.cpu() if bool((allowed | forbidden).all()) else None


def _literals(mask: fx.Node) -> set[int]:
    """Return the integers in the mask's graph that may be a window longer than the probes."""
    found: set[int] = set()
    for node in ancestors([mask]):
        found |= {value for value in node.args if isinstance(value, int) and max(_LENGTHS) <= value < _LARGEST_LITERAL}
    return found


def _evaluate(gm: fx.GraphModule, mask: fx.Node, length: int, swaps: dict[int, int]) -> torch.Tensor | None:
    """Compute the mask for sequences of `length`, with integer literals replaced as `swaps` says.

    None when that takes more than positions and constants: token ids, or parameters that have no values yet.
    """
    needed = ancestors([mask])
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node not in needed:
            continue
        value = _leaf(gm, node, length) if node.op != "call_function" else _call(node, values, swaps)
        if value is None:
            return None
        values[node] = value
    result = values[mask]
    return result if isinstance(result, torch.Tensor) else None


def _leaf(gm: fx.GraphModule, node: fx.Node, length: int) -> torch.Tensor | None:
    if node.op == "placeholder":
        device = node.meta["val"].device
        if node.target == "position_ids":
            return torch.arange(length, device=device).expand(_BATCH, length).contiguous()
        # Token ids may give their shape; a mask that depends on their values (padding) then shows as no known form.
        return torch.arange(_BATCH * length, device=device).view(_BATCH, length) if node.target == "input_ids" else None
    tensor = attr_tensor(gm, node)
    return None if tensor is None or tensor.is_meta else tensor


def _call(node: fx.Node, values: dict[fx.Node, Any], swaps: dict[int, int]) -> Any:
    assert callable(node.target)
    args = [swaps.get(value, value) if type(value) is int else value for value in node.args]
    args, kwargs = fx.map_arg((args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)
