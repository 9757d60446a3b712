"""A model run with sizes as symbols: what the forwards of its classes do, for texts of any length."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.tiny.tiny_config import one_line
from onboard.codegen.straight.left import begun_anew, counts
from onboard.codegen.straight.straight_lines import NotStraight
from onboard.codegen.straight.watched_calls import Watched, watching
from onboard.graph.shapes import python_dispatcher

_ROWS, _LENGTH = 3, 11
"""Sizes that no other size of a small model is."""


class NotRun(NotStraight):
    """A model does not run with sizes as symbols."""


def recorded(
    model: nn.Module,
    classes: Collection[type],
    leaves: Collection[Any],
    positions: bool,
    *,
    twice: bool = True,
) -> Watched:
    """Run a model on texts of any size and length; return what its classes did.

    Args:
        model: it may hold what the run leaves afterwards.
        classes: the classes of modules whose forwards are recorded.
        leaves: functions whose calls stay.
        positions: it is given `position_ids`.
        twice: it runs twice, and has to do the same.

    Raises:
        NotStraight: it does not run so, or does something else for other sizes.
    """
    env = ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)  # fmt: skip
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    # To look up what an operator gave for such symbols takes longer than to find it out again
    mode.cache_enabled = False
    watched = Watched(classes, leaves, PACKAGE)
    again = Watched(classes, leaves, PACKAGE, known=watched.known)
    counted = []
    _give_shapes(model, mode)
    try:
        with torch.no_grad(), _quiet(), python_dispatcher(), begun_anew():
            for each in (watched, again)[: 1 + twice]:
                inputs = _inputs(mode, positions)
                with mode, watching(each):
                    model(**inputs, use_cache=False)
                counted.append(counts(model))
    except Exception as error:
        reason = next(iter(watched.failed.values()), one_line(error))
        raise NotRun(reason) from error
    limit = getattr(model.config, "max_position_embeddings", None)
    watched.single = _check_guards(env, limit if isinstance(limit, int) else 0)
    if not twice:
        return watched
    if changed := [key for key, value in counted[0].items() if counted[1].get(key) != value]:
        raise NotStraight(f"it counts its calls ({changed[0]})")
    for cls in watched.found:
        once, anew = ([item[1] for item in each.found.get(cls, [])] for each in (watched, again))
        if once != anew:
            watched.failed.setdefault(cls, "a second call does something else than the first")
    return watched


def _inputs(mode: FakeTensorMode, positions: bool) -> dict[str, torch.Tensor]:
    def symbolic() -> torch.Tensor:
        kind: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
        ids = torch.zeros(_ROWS, _LENGTH, dtype=torch.int64)
        return mode.from_tensor(ids, symbolic_context=kind)

    ids = symbolic()
    if not positions:
        return {"input_ids": ids}
    with mode:
        return {"input_ids": ids, "position_ids": torch.zeros_like(ids)}


def _check_guards(env: ShapeEnv, longest: int) -> set[int]:
    """Refuse what is decided by sizes, unless by their being two or more, and not more than a text
    has positions. Return single sizes that something was decided for, which torch does for tables:
    what happens there has to be tried.
    """
    single = set()
    for guard in env.guards:
        match guard.expr:
            case sympy.Ne(args=(sympy.Symbol(), sympy.Integer() as size)) if size <= longest:
                single.add(int(size))
            case sympy.Eq(args=(sympy.Symbol(), sympy.Integer())):
                said = "it needs a size of its input as a number, as a loop over tokens does"
                raise NotStraight(said + _place(guard))
            case expr if not _always(expr, longest):
                said = f"it does something else for some sizes ({expr})"
                raise NotStraight(said + _place(guard))
    return single


def _place(guard: Any) -> str:
    """Return `, at file.py:12` where code of others than torch decided something by a size."""
    path, _, line = str(guard.sloc).strip("()").split(" in ")[0].rpartition(":")
    return f", at {Path(path).name}:{line}" if path and "site-packages" not in path else ""


def _always(expr: Any, longest: int) -> bool:
    """Whether a condition holds for all sizes of two or more, or for those up to a length."""
    symbols = sorted(expr.free_symbols, key=str)
    above = {
        symbol: sympy.Symbol(f"n{index}", integer=True, nonnegative=True) + 2
        for index, symbol in enumerate(symbols)
    }
    if sympy.simplify(expr.subs(above)) == sympy.true:
        return True
    if len(symbols) != 1 or not isinstance(expr, sympy.Le | sympy.Lt | sympy.Ge | sympy.Gt):
        return False
    difference = expr.lhs - expr.rhs
    if not difference.is_polynomial(symbols[0]):
        return False
    is_linear = sympy.Poly(difference, symbols[0]).degree() == 1
    return bool(is_linear and all(expr.subs(symbols[0], size) for size in (2, longest)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing errors that are caught here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with mock.patch.object(logger, "disabled", True):
        yield


def _give_shapes(model: nn.Module, mode: FakeTensorMode) -> None:
    """Put tensors without values in the place of those on the meta device; numbers that modules keep
    as tensors, which code may read, stay known.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, item in list(vars(module).items()):
            if isinstance(item, torch.Tensor) and item.dim() == 0 and not item.is_meta:
                number: Any = mode.from_tensor(item)
                number.constant = item
                setattr(module, name, number)
    for module in model.modules():
        for name, item in list(module._parameters.items()):
            if item is not None and item.is_meta and id(item) not in made:
                with mode:
                    empty = torch.empty(item.shape, dtype=item.dtype)
                made[id(item)] = nn.Parameter(empty, requires_grad=False)
            if item is not None and id(item) in made:
                module._parameters[name] = made[id(item)]
