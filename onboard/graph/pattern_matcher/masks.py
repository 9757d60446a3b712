"""Which keys an attention mask lets each query see: found out by computing the mask, not by reading
its graph.

transformers builds masks in many ways, and changes them between versions. What counts is the
outcome: the nodes that the mask is computed from are run on small inputs, and the result is
compared with a causal triangle and with bands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from onboard.graph.fx import ancestors, attr_tensor, is_op

aten = torch.ops.aten
_SIZES = (
    aten.sym_size,
    aten.ones_like,
    aten.zeros_like,
    aten.full_like,
    aten.empty_like,
    aten.new_ones,
    aten.new_zeros,
    aten.new_full,
    aten.new_empty,
)
"""What takes of a tensor its shape alone."""
PROBED = 2
"""Texts in a batch whose masks are computed."""
_LENGTHS = (24, 37)
_SMALL_WINDOW = 5
_LONGEST_TABLE = 16384
_LARGEST_LITERAL = 2**31  # larger integers stand for "to the end" in slices


@dataclass(frozen=True)
class MaskForm:
    """A mask that attention can compute by itself."""

    is_causal: bool
    sliding_window: int | None = None
    chunk_size: int | None = None

    def at(self, length: int) -> MaskForm:
        """Return the form that shows in a sequence of `length`: a longer window is none, nor is a
        longer chunk.
        """
        bounds = (self.sliding_window, self.chunk_size)
        window, chunk = (
            bound if bound is not None and bound < length else None for bound in bounds
        )
        return MaskForm(self.is_causal, window, chunk)


def mask_form(gm: fx.GraphModule, mask: fx.Node, *, hides: bool = False) -> MaskForm | None:
    """Return what a mask [batch, heads or 1, sequence, sequence] amounts to, None when it is none
    of the known forms. With `hides`, its truth values are those of keys that a query does not see.

    A window or chunk longer than the probes is found through its literal: every integer in the
    mask's graph is replaced by a small one of its sign in turn, and the window must follow it. A
    mask cut out of a table is looked at in its full size.
    """
    longest = _table_length(gm, mask)
    if longest > _LONGEST_TABLE:
        return None
    short, form = (
        _form(evaluate(gm, mask, length, {}), length, hides) for length in (_LENGTHS[0], longest)
    )
    if form is None or short != form.at(_LENGTHS[0]):
        return None
    return _bounded(gm, mask, form, hides)


def _bounded(gm: fx.GraphModule, mask: fx.Node, form: MaskForm, hides: bool) -> MaskForm | None:
    """Return a mask's form with the bounds that show only once its literals are small."""
    short = form.at(_LENGTHS[0])
    windows, chunks = (
        {bound} if bound else set() for bound in (form.sliding_window, form.chunk_size)
    )
    for literal in _literals(mask):
        small_one = _SMALL_WINDOW if literal > 0 else -_SMALL_WINDOW
        swapped = evaluate(gm, mask, _LENGTHS[0], {literal: small_one})
        small = _form(swapped, _LENGTHS[0], hides)
        if small == short:
            continue
        if small is None or small.is_causal != form.is_causal or short != MaskForm(form.is_causal):
            return None
        if small.chunk_size is not None:
            chunks.add(abs(literal) + small.chunk_size - _SMALL_WINDOW)
        if small.sliding_window is not None:
            windows.add(abs(literal) + small.sliding_window - _SMALL_WINDOW)
    return (
        MaskForm(form.is_causal, min(windows, default=None), min(chunks, default=None))
        if len(chunks) < 2
        else None
    )


def _table_length(gm: fx.GraphModule, mask: fx.Node) -> int:
    """Return the size of the largest square table that a mask is cut out of, or that of the longer
    probe.
    """
    leaves = [attr_tensor(gm, node) for node in ancestors([mask]) if node.op == "get_attr"]
    tables = [
        leaf
        for leaf in leaves
        if leaf is not None and leaf.dim() >= 2 and leaf.shape[-1] == leaf.shape[-2]
    ]
    return max([_LENGTHS[-1], *(table.shape[-1] for table in tables)])


def _form(mask: torch.Tensor | None, length: int, hides: bool) -> MaskForm | None:
    if hides and mask is not None:
        mask = mask == 0
    allowed = _allowed(mask, length)
    if allowed is None:
        return None
    allowed = allowed.expand(PROBED, allowed.shape[1], length, length)
    if bool(allowed.all()):
        return MaskForm(False)
    window, chunk = int(allowed[0, 0, -1].sum()), max(1, int(allowed[0, 0, :, 0].sum()))
    candidates = (MaskForm(True, window), MaskForm(True, None, chunk), MaskForm(False, None, chunk))
    found = (
        form for form in candidates if torch.equal(allowed, seen(form, length).expand_as(allowed))
    )
    return next((form.at(length) for form in found), None)


def seen(form: MaskForm, length: int) -> torch.Tensor:
    """Return which keys each query sees, [length, length] bool."""
    keys = torch.arange(length)
    queries = keys.unsqueeze(1)
    allowed = torch.ones(length, length, dtype=torch.bool)
    if form.is_causal:
        allowed = allowed & (queries >= keys)
    if form.sliding_window is not None:
        allowed = allowed & (queries - keys < form.sliding_window)
    if form.chunk_size is not None:
        allowed = allowed & (queries // form.chunk_size == keys // form.chunk_size)
    return allowed


def _allowed(mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Return a mask as bool, None when it is no mask: a bias, or of another shape."""
    if mask is not None and mask.dim() == 2:
        mask = mask[None, None]
    if (
        mask is None
        or mask.dim() != 4
        or mask.shape[0] not in (1, PROBED)
        or mask.shape[-1] != length
    ):
        return None
    if mask.dtype == torch.bool:
        return mask.cpu()
    allowed, forbidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    return allowed.cpu() if bool((allowed | forbidden).all()) else None


def _literals(mask: fx.Node) -> set[int]:
    """Return the integers in the mask's graph that may be a window longer than the probes: below
    zero, too, as of `torch.tril(mask, -window)`.
    """
    found: set[int] = set()
    for node in ancestors([mask]):
        found |= {
            value
            for value in node.args
            if isinstance(value, int) and max(_LENGTHS) <= abs(value) < _LARGEST_LITERAL
        }
    return found


def evaluate(
    gm: fx.GraphModule,
    mask: fx.Node,
    length: int,
    swaps: dict[int, int],
    given: Mapping[fx.Node, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor | None:
    """Compute a mask, or what else positions decide, for sequences of `length`; `swaps` replaces
    integer literals.

    None when that takes more than positions and constants: what token ids are, or parameters that
        have no values yet.
    """
    needed = ancestors([mask], given)
    if _asks_tokens(gm, mask, needed, given):
        return None
    values: dict[fx.Node, Any] = dict(given)
    for node in gm.graph.nodes:
        if node not in needed or node in given:
            continue
        value = (
            _leaf(gm, node, length) if node.op != "call_function" else _call(node, values, swaps)
        )
        if value is None:
            return None
        values[node] = value
    result = values[mask]
    return result if isinstance(result, torch.Tensor) else None


def _asks_tokens(
    gm: fx.GraphModule, mask: fx.Node, needed: Collection[fx.Node], given: Collection[fx.Node]
) -> bool:
    """Whether a mask depends on what token ids are, not on how many there are alone: those that it asks
    for may not be among the ids of a probe.
    """
    asking: set[fx.Node] = set()
    for node in (each for each in gm.graph.nodes if each in needed and each not in given):
        read = node.target == "input_ids" if node.op == "placeholder" else not is_op(node, *_SIZES)
        if read and (node.op == "placeholder" or not asking.isdisjoint(node.all_input_nodes)):
            asking.add(node)
    return mask in asking


def _leaf(gm: fx.GraphModule, node: fx.Node, length: int) -> torch.Tensor | None:
    if node.op == "placeholder":
        device = node.meta["val"].device
        if node.target == "position_ids":
            return torch.arange(length, device=device).expand(PROBED, length).contiguous()
        # Token ids may give their shape
        return (
            torch.arange(PROBED * length, device=device).view(PROBED, length)
            if node.target == "input_ids"
            else None
        )
    tensor = attr_tensor(gm, node)
    return None if tensor is None or tensor.is_meta else tensor


def _call(node: fx.Node, values: dict[fx.Node, Any], swaps: dict[int, int]) -> Any:
    assert callable(node.target)
    args = [swaps.get(value, value) if type(value) is int else value for value in node.args]
    args, kwargs = fx.map_arg((args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)
