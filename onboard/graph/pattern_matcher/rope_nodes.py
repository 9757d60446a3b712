"""How rotary embeddings look when they are written out."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from onboard.graph.fx import is_op, only_user
from onboard.graph.pattern_matcher.patterns import (
    CASTS,
    Bound,
    Either,
    Op,
    Var,
    aten,
    dtype,
    find,
    is_node,
    rank,
    same_dim,
    same_shape,
)

EXPLICIT = torch.ops.onboard.torch_rope_with_explicit_cos_sin.default
INTERLEAVED = torch.ops.onboard.torch_rope_with_qk_interleaving.default
COMPLEX = torch.ops.onboard.torch_rope_with_complex_freqs.default

_X = Var("x", where=is_node)
_UNSQUEEZE_DIM = Var("unsqueeze_dim")
_COS = Op(aten.unsqueeze, Var("cos", where=is_node), _UNSQUEEZE_DIM)
_SIN = Op(aten.unsqueeze, Var("sin", where=is_node), _UNSQUEEZE_DIM)
_HALVES = Either(
    [
        Op(aten.neg, Op(aten.slice, _X, Var("dim"), Var("half"))),
        Op(aten.slice, _X, Var("dim"), 0, Var("half")),
    ],
    [
        Op(aten.neg, Op(operator.getitem, Op(aten.chunk, _X, 2, Var("dim"), bind="chunks"), 1)),
        Op(operator.getitem, Var("chunks"), 0),
    ],
)
_HALF_ROTATION = Op(
    aten.add,
    Op(aten.mul, _X, _COS, commutes=True),
    Op(aten.mul, Op(aten.cat, _HALVES, Var("cat_dim")), _SIN, commutes=True),
    commutes=True,
)
_PAIRS = Op(aten.view_as_complex, Op((aten.reshape, aten.view, aten.unflatten), _X))
_COMPLEX_ROTATION = Op(
    (aten.flatten, aten.reshape, aten.view),
    Op(
        aten.view_as_real,
        Op(
            aten.mul,
            _PAIRS,
            Op(aten.unsqueeze, Var("freqs", where=is_node), _UNSQUEEZE_DIM),
            commutes=True,
        ),
    ),
)
_PASSED_ON = Op(
    aten.cat,
    [Var("rotated"), Op(aten.slice, Var("whole"), Var("dim"), Var("size"))],
    Var("cat_dim"),
)
_LEADING = Op(aten.slice, Var("whole", where=is_node), Var("dim"), 0, Var("size"))
_DEINTERLEAVED = Op(
    (aten.reshape, aten.view),
    Op(
        aten.transpose,
        Op((aten.view, aten.reshape), Var("x", where=is_node), Var("sizes")),
        Var("dim0"),
        Var("dim1"),
    ),
)


@dataclass
class Rotation:
    """One tensor's rotation: `output` is `op` of `x` with the tables `tables`."""

    op: torch._ops.OpOverload[..., object]
    x: fx.Node
    output: fx.Node
    tables: tuple[fx.Node, ...]
    unsqueeze_dim: int


def find_rotation(node: fx.Node) -> Rotation | None:
    """Return the rotation whose last operation is `node` (of the channels that it rotates), None
    when it is none.
    """
    if found := find(_HALF_ROTATION, node):
        return _half_rotation(node, found)
    if found := find(_COMPLEX_ROTATION, node):
        x = found["x"]
        if rank(x) == 4 and rank(found["freqs"]) == 3 and same_shape(node, x):
            return _without_casts(
                Rotation(COMPLEX, x, node, (found["freqs"],), found["unsqueeze_dim"] % 4)
            )
    return None


def _without_casts(rotation: Rotation) -> Rotation:
    """Absorb a cast to float32 before and the cast back after a complex rotation: the op does
    both.
    """
    source, back = rotation.x, only_user(rotation.output)
    if is_op(source, *CASTS) and is_op(back, *CASTS):
        source = source.args[0]  # type: ignore[assignment]
        if back is not None and dtype(back) == dtype(source):
            rotation.x, rotation.output = source, back
    return rotation


def _half_rotation(node: fx.Node, found: Bound) -> Rotation | None:
    x, tables = found["x"], (found["cos"], found["sin"])
    if rank(x) != 4 or not all(same_dim(found[dim], x, 3) for dim in ("dim", "cat_dim")):
        return None
    size = x.meta["val"].shape[-1]
    if found.get("half", size // 2) * 2 != size or any(rank(table) != 3 for table in tables):
        return None
    # It may be counted from the end
    rotation = Rotation(EXPLICIT, x, node, tables, found["unsqueeze_dim"] % 4)
    return _with_interleaving(_with_rest(rotation))


def _with_rest(rotation: Rotation) -> Rotation:
    """Widen a rotation of the first channels to one of the whole head whose other channels pass."""
    joined = only_user(rotation.output)
    leading, passed = find(_LEADING, rotation.x), joined and find(_PASSED_ON, joined)
    if not (leading and passed and joined):
        return rotation
    fits = passed["rotated"] is rotation.output and passed["whole"] is leading["whole"]
    if fits and passed["size"] == leading["size"] and same_dim(passed["cat_dim"], joined, 3):
        rotation.x, rotation.output = leading["whole"], joined
    return rotation


def _with_interleaving(rotation: Rotation) -> Rotation:
    """Absorb the de-interleaving of channels in front of a half rotation."""
    found = find(_DEINTERLEAVED, rotation.x)
    if (
        found
        and rank(found["x"]) == 4
        and found["sizes"][-1] == 2
        and {found["dim0"] % 5, found["dim1"] % 5} == {3, 4}
    ):
        rotation.op, rotation.x = INTERLEAVED, found["x"]
    return rotation
