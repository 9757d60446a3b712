"""What a core computes, learned from its results for chosen operands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onboard.codegen.cores.core_runs import Core, CutAxes, Dims, NotAttentionError

_EXACT = 1e-9
_FAINT = 1e-3
"""Scores so small that a soft cap leaves them as they are."""


@dataclass(frozen=True)
class Meaning:
    """Settings of the canonical op; the tensors are [heads] float64."""

    scale: float
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Operands:
    """Random operands [batch, heads, positions, channels] float64."""

    query: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def random(axes: CutAxes, dims: Dims, seed: int) -> Operands:
        """Return numbers around zero, of the order of one."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [
            torch.randn(
                (dims[0], heads, dims[1], each.channels), generator=generator, dtype=torch.float64
            )
            for each, heads in (
                (axes.query, axes.query.heads),
                (axes.key, axes.key.heads),
                (axes.value, axes.value.heads),
            )
        ]
        return Operands(*drawn)

    def products(self) -> Tensor:
        """Return the products of queries and keys, [batch, heads, queries, keys]."""
        repeats = self.query.shape[1] // self.key.shape[1]
        return self.query @ self.key.repeat_interleave(repeats, 1).transpose(2, 3)

    def of_size(self, size: float, scale: float) -> Operands:
        """Return the same with queries for which the largest scaled product is `size`."""
        most = float(self.products().abs().max()) * abs(scale)
        return replace(self, query=self.query * (size / most))


def weights(core: Core, dims: Dims, axes: CutAxes, operands: Operands) -> Tensor:
    """Return the weights that values are added up with, [batch, heads, queries, keys]."""
    width, found = operands.value.shape[-1], []
    for start in range(0, dims[1], width):
        value = torch.zeros_like(operands.value)
        count = min(width, dims[1] - start)
        value[:, :, range(start, start + count), range(count)] = 1
        found.append(core(dims, axes, operands.query, operands.key, value)[..., :count])
    return torch.cat(found, dim=-1)


def meanings(core: Core, axes: CutAxes, dims: list[Dims]) -> Iterator[Meaning]:
    """Yield what fits the results for `dims`: two short texts first, the longest last; scales as they
    were measured, caps left out.

    Raises `NotAttentionError` where nothing fits.
    """
    first = dims[0]
    drawn = Operands.random(axes, first, seed=1)
    silent = weights(core, first, axes, replace(drawn, query=torch.zeros_like(drawn.query)))
    _check_rows(silent)
    slopes, sinks = _slopes(silent), _sinks(silent)
    scales = [_scale(core, axes, each, slopes) for each in dims[:2]]
    if not math.isclose(*scales, rel_tol=1e-6):
        raise NotAttentionError(f"its scale changes with the text ({scales[0]:g}, {scales[1]:g})")
    base = Meaning(scales[0], slopes=slopes, sinks=sinks)
    near = list(_sights((silent[0, 0] > 0).sum(-1).tolist()))
    if near != [(None, None)]:
        yield from (replace(base, window=window, chunk=chunk) for window, chunk in near)
        return
    begin = _first_seen(core, axes, dims[-1])
    if begin == 0 or slopes is not None:
        yield base
    if begin:
        yield replace(base, window=dims[-1][1] - begin)
        for chunk in range(dims[-1][1] - begin, begin + 1):
            if begin % chunk == 0:
                yield replace(base, chunk=chunk)


def _check_rows(silent: Tensor) -> None:
    """Refuse what no scores but zeros make something else than causal attention."""
    seen = silent > 0
    if not bool(silent.isfinite().all()):
        raise NotAttentionError("scores of zero give no numbers")
    if not torch.allclose(silent, silent[:1].expand_as(silent), rtol=_EXACT, atol=_EXACT):
        raise NotAttentionError("what a query sees differs between the texts of a batch")
    if bool(seen.triu(1).any()):
        raise NotAttentionError("a query sees later tokens")
    if not bool(seen.diagonal(dim1=-2, dim2=-1).all()):
        raise NotAttentionError("a query does not see its own token")
    if not bool((seen == seen[:, :1]).all()):
        raise NotAttentionError("its heads see different tokens")
    if float(silent.sum(-1).max()) > 1 + _EXACT:
        raise NotAttentionError("its weights add up to more than one")


def _slopes(silent: Tensor) -> Tensor | None:
    """Return the slope of each head by which scores fall with the distance; None where none do."""
    logs = silent[0].log()
    bias = logs - logs.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    length = silent.shape[-1]
    slopes = -bias[:, -1, -2].clamp(min=-1e30)
    if not bool((silent[0, :, -1, -2] > 0).all()):
        return None
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    expected = slopes[:, None, None] * distance
    seen = silent[0] > 0
    if not torch.allclose(bias[seen], expected[seen], rtol=1e-7, atol=_EXACT):
        raise NotAttentionError("what is added to its scores is no multiple of the distance")
    return slopes if float(slopes.abs().max()) > _EXACT else None


def _sinks(silent: Tensor) -> Tensor | None:
    first = silent[0, :, 0, 0]
    return (1 / first - 1).log() if float((1 - first).max()) > _EXACT else None


def _scale(core: Core, axes: CutAxes, dims: Dims, slopes: Tensor | None) -> float:
    drawn = Operands.random(axes, dims, seed=2)
    operands = drawn.of_size(_FAINT, 1.0)
    found, products = weights(core, dims, axes, operands), operands.products()
    own = [each.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) for each in (found.log(), products)]
    seen = (found > 0).tril(-1)
    measured, wanted = (found.log() - own[0])[seen], (products - own[1])[seen]
    if slopes is not None:
        distance = torch.arange(dims[1])[None] - torch.arange(dims[1])[:, None]
        bias = (slopes[:, None, None] * distance).expand_as(found)
        measured = measured - bias[seen]
    if not len(wanted):
        return 1.0
    scale = float((measured * wanted).sum() / wanted.square().sum())
    error = float((measured - scale * wanted).abs().max())
    if not error <= 1e-5 * abs(scale) * _FAINT + 1e-12:
        raise NotAttentionError("its scores are no multiple of the products of queries and keys")
    return scale


def _sights(counts: list[int]) -> Iterator[tuple[int | None, int | None]]:
    """Yield windows and chunks in which queries see so many keys each."""
    most = max(counts)
    places = range(len(counts))
    if counts == [place + 1 for place in places]:
        yield None, None
        return
    if counts == [min(place + 1, most) for place in places]:
        yield most, None
    if counts == [place % most + 1 for place in places]:
        yield None, most
    if counts[-1] not in (most, (len(counts) - 1) % most + 1):
        raise NotAttentionError("what a query sees is neither a window nor a chunk")


def _first_seen(core: Core, axes: CutAxes, dims: Dims) -> int:
    """Return the first key that the last query of a text sees, by a search between places."""
    drawn = Operands.random(axes, dims, seed=3)
    silent = torch.zeros_like(drawn.query)
    unseen, seen = -1, dims[1] - 1
    places = torch.arange(dims[1])
    while seen - unseen > 1:
        width = drawn.value.shape[-1]
        ends = torch.linspace(unseen, seen, width + 2)[1:-1].ceil().long().clamp(max=seen - 1)
        value = (places[:, None] <= ends).double().expand_as(drawn.value)
        last = core(dims, axes, silent, drawn.key, value)[0, :, -1].amax(0) > 0
        unseen = max([unseen, *ends[~last].tolist()])
        seen = min([seen, *ends[last].tolist()])
    return seen
