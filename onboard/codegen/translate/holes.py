"""The holes of a result's shape, which its parts fill."""

from __future__ import annotations

from dataclasses import replace

from onboard.codegen.translate.compressed import Entries
from onboard.codegen.translate.values import Code, Hole, Items, Mapping, Output, Value


def fill(shape: Value, parts: list[Code]) -> Value:
    """Return `shape` with its holes replaced by `parts`."""
    match shape:
        case Hole(like=Entries() as like):
            return replace(like, expr=parts[0].expr, chosen=parts[1].expr)
        case Hole(index=index, like=Code() as like):
            return replace(like, expr=parts[index].expr)
        case Hole(index=index, form=form, optional=optional):
            return replace(parts[index], form=form, optional=optional)
        case Items(items=items):
            return Items(tuple(fill(item, parts) for item in items))
        case Mapping(items=entries):
            return Mapping({key: fill(item, parts) for key, item in entries.items()})
        case Output(fields=fields):
            return Output({key: fill(item, parts) for key, item in fields.items()})
    return shape
