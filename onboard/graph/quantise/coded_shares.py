"""A rank's share of a quantised weight: codes, and the scales of their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onboard.graph.weight_load.parameters import Share, of_runs
from onboard.quantised.encoded import Encoded
from onboard.quantised.weight import QuantisedWeight, blocks

Runs = Sequence[tuple[int, int]]
Kept = dict[int, list[tuple[int, int]]]
"""Dimension of a tensor -> the runs of its entries; the other dimensions are whole."""
_OF_INPUTS = {"groups", "inputs"}
"""Parts that say something of each input: shares of inputs would have to be put in another order."""


def weight_of_share(weight: QuantisedWeight, share: Share) -> QuantisedWeight | None:
    """Return what a rank has of a matrix or a stack; None where its codes cannot stay so: a share
    takes blocks with one scale apart, or inputs are not in the order of their groups.
    """
    if share.shape != weight.shape or len(weight.shape) not in (2, 3):
        return None
    if len(weight.shape) == 2 and weight.transposed:
        return None
    own = matrix_share(weight, share)
    if 1 in own.kept and _OF_INPUTS & weight.parts.keys():
        return None
    units = weight.block or (1, own.shape[1])
    if not all(_whole_blocks(runs, units[dim], own.shape[dim]) for dim, runs in own.kept.items()):
        return None
    return replace(weight, shape=share.own_shape)


def matrix_share(weight: QuantisedWeight, share: Share) -> Share:
    """Return what a rank has of a matrix, or of each matrix of a stack, by the dimensions of its
    codes: outputs and inputs.
    """
    if len(share.shape) == 2:
        return share
    dims = (2, 1) if weight.transposed else (1, 2)
    kept = {own: share.kept[dim] for own, dim in enumerate(dims) if dim in share.kept}
    return Share(tuple(share.shape[dim] for dim in dims), kept)


def _whole_blocks(runs: Runs, unit: int, size: int) -> bool:
    """Whether runs take no block apart; one that has all entries serves any of them."""
    ends = (end for run in runs for end in run)
    return unit >= size or all(end % unit == 0 or end == size for end in ends)


def parts_of_share(
    weight: QuantisedWeight, shapes: Mapping[str, Sequence[int]], share: Share
) -> dict[str, Kept] | None:
    """Return what a rank's share of a matrix [outputs, inputs] needs of each of its parts, of these
    shapes; None where it takes something apart, or parts lie otherwise.
    """
    if weight.axes is None:
        return None
    wanted: dict[str, Kept] = {role: {} for role in shapes}
    for dim, runs in share.kept.items():
        size, block = share.shape[dim], weight.block and weight.block[dim]
        for role, shape in shapes.items():
            if len(shape) < 2:
                continue
            if (count := shape[axis := weight.axes[dim]]) == 1 and not _is_in_words(role, dim):
                continue  # one for all
            unit = None if count == 1 else _unit(role, size, count, block)
            if unit is None or not _whole_blocks(runs, unit, size):
                return None
            wanted[role][axis] = [(start // unit, -(-stop // unit)) for start, stop in runs]
    return wanted


def _is_in_words(role: str, dim: int) -> bool:
    """Tell whether a part may have several entries of a dimension in a word."""
    return role == "codes" or (role == "zero" and dim == 0)


def _unit(role: str, size: int, count: int, block: int | None) -> int | None:
    """Return how many of `size` entries each of `count` stands for; None where that is not told, as
    of scales of blocks of outputs with all their inputs.
    """
    if block is not None and count == blocks(size, block):
        return block
    is_even = count == size or (role != "scale" and size % count == 0)
    return size // count if is_even else None


def encoded_share(encoded: Encoded, share: Share) -> Encoded:
    """Return the codes [outputs, inputs] of a rank, with their scales: of blocks, or of each output
    where the rank's outputs take blocks apart.
    """
    for dim, runs in share.kept.items():
        if dim == 0 and not _whole_blocks(runs, encoded.rows, share.shape[0]):
            encoded = encoded.by_outputs()
        encoded = _of_dimension(encoded, dim, runs)
    return encoded


def _of_dimension(encoded: Encoded, dim: int, runs: Runs) -> Encoded:
    unit = (encoded.rows, encoded.columns)[dim]
    own = replace(encoded, codes=of_runs(encoded.codes, dim, runs))
    if unit >= encoded.codes.shape[dim]:  # one block, of which each rank has some
        return own
    own_blocks = [(start // unit, -(-stop // unit)) for start, stop in runs]
    return own.with_blocks(lambda tensor: of_runs(tensor, dim, own_blocks))
