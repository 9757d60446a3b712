"""Items and slices of values."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from transformers.activations import ClassInstantier

from onboard.codegen.translate.language import config_values
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.config_values import Setting
from onboard.codegen.translate.language.expressions import objects
from onboard.codegen.translate.language.expressions.decisions import decided_here
from onboard.codegen.translate.language.expressions.module_lists import one_of
from onboard.codegen.translate.language.forms import (
    CHUNKED,
    COMPLEX,
    MAYBE,
    POSITIONS,
    ROWS,
    ROWS_OF_HEADS,
    TRIANGLE,
)
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed import attributes, gathered
from onboard.codegen.translate.language.handed import listed as listed_objects
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.handed.listed import Listed, Objects, listed
from onboard.codegen.translate.language.object_values import (
    Global,
    Instance,
    Made,
    MaskMaker,
    ModuleList,
    ModuleRows,
    ModuleTable,
    Repeated,
)
from onboard.codegen.translate.language.sequences import item_in, sequence_of
from onboard.codegen.translate.language.trees.syntax import (
    NothingThere,
    Untranslatable,
    constant,
    same_code,
)
from onboard.codegen.translate.language.values import (
    NONE,
    Code,
    Half,
    Items,
    Known,
    Mapping,
    Mask,
    PaddingMask,
    Value,
)

_DICTS = {f"dict of {form}": form for form in (COMPLEX, CHUNKED)} | {f"dict of {MAYBE}": None}


def item_of(owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value:
    """Return `owner[index]`."""
    if (found := frame.mechanisms.item(owner, index, node, frame)) is not None:
        return found
    for known in (_of_objects, _of_form):
        if (item := known(owner, index, node, frame)) is not None:
            return item
    match owner, index:
        case Output(fields=fields), Known(value=str() as key) if key in fields:
            return fields[key]
        case Output(fields=fields), Known(value=int() | slice()):
            given = Items(tuple(value for value in fields.values() if not value.equals(NONE)))
            return item_of(given, index, node, frame)
        case Mask(), _:  # one of a dict of masks, or a part of one
            return replace(owner, whole=False)
        case Repeated(item=item), Known(value=int()) | Code() if not _is_slice(index):
            return item
        case Items(items=items), Known(value=int() as position):
            return items[position]
        case Items(items=items), Known(value=slice() as part):
            return Items(items[part], kind=owner.kind)
        case Known(value=None), _:
            raise NothingThere(f"an item of None at {frame.source.location(node)}")
        case Known(value=known), Known(value=key):
            return Known(known[key])
        case Setting(value=dict() as entries), Known(value=str() as key) if key in entries:
            return owner.item(key)
        case Global(obj=dict() | list() | tuple()), Known() | Setting() if entry := _of_table(
            owner, index, frame
        ):
            return entry
        case Global(obj=dict() | list() | tuple()), Code(static=True) if chosen := _chosen_here(
            owner, index, frame
        ):
            return chosen
        case Global(obj=dict() as table), Code(static=True) if choice := objects.choice(
            _asked_for(table, index, frame), index, frame
        ):
            return choice
        case Mapping(), Known(value=str()) | Code(static=True) if entry := _of_mapping(
            owner, index, node, frame
        ):
            return entry
        case ModuleTable(entries=entries), Known(value=str() as key) if key in entries:
            return owner.entry(key)
        case ModuleList() | ModuleRows(), _:
            return one_of(owner, index)
        case Code(), Items(items=parts) if _keeps_everything(parts):
            return owner
        case Code(), Known(value=slice()) if _keeps_everything((index,)):
            return owner
        case Code(transposed=True), Items(items=(Known(value=first), Known() | Code())) if (
            first is Ellipsis
        ):
            sliced = ast.Subscript(owner.expr, index.code(), ast.Load())
            return Code(sliced, transposed=True)
    expr = ast.Subscript(owner.code(), _index_code(node.slice, index, frame), ast.Load())
    triangle = isinstance(owner, Code) and owner.form == TRIANGLE and _cuts_corner(node.slice)
    return Code(expr, owner.is_static and index.is_static, form=TRIANGLE if triangle else None)


def _of_objects(owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
    """Return an item of a list of objects, or a part of that; None for others."""
    if isinstance(owner, Output):
        return attributes.called(owner, "__getitem__", Args([index], {}, []), frame)
    if isinstance(owner, Objects):
        place = ast.Subscript(owner.expr, _index_code(node.slice, index, frame), ast.Load())
        return replace(owner, expr=place) if _is_cut(index) else owner.item(place)
    if isinstance(whole := listed(owner), Listed) and isinstance(index, Code):
        return listed_objects.item_of(whole.items, index)
    return None


def _is_slice(index: Value) -> bool:
    return isinstance(index, Code) and isinstance(index.expr, ast.Slice)


def _is_cut(index: Value) -> bool:
    return _is_slice(index) or (isinstance(index, Known) and isinstance(index.value, slice))


def _of_form(owner: Value, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
    """Return an item of a tensor or a dict of which more is known; None where that says nothing."""
    if index.equals(NONE):
        index = Items((NONE,))  # `x[None]` is `x[None, :]`
    match owner, index:
        case Code(form=str() as form), Items(items=(Known(value=slice()), *_)) if form == POSITIONS:
            frame.translator.pairs_positions = True
            raise Untranslatable("distances between counted positions")
        case Code(form=str() as form), Items(items=(Known(value=None), *_)) if form == POSITIONS:
            return owner
        case Code(form=str() as form), Items(items=(Known(value=None), *rest)) if form == ROWS:
            return _rows(owner, rest)
        case Code(form=str() as form), Items(items=(Known(value=slice() as every), *rest)) if (
            form == ROWS and every == slice(None)
        ):
            return _of_each_row(owner, rest, node)
        case Code(form=str() as form), Known(value=int() as part) if form == COMPLEX:
            return Half(owner, part)
        case Code(form=str() as form), _ if form in _DICTS:
            expr = ast.Subscript(owner.expr, index.code(), ast.Load())
            return Code(expr, form=_DICTS[form], optional=form != f"dict of {COMPLEX}")
    if isinstance(owner, Code) and sequence_of(owner) is not None:
        expr = ast.Subscript(owner.code(), _index_code(node.slice, index, frame), ast.Load())
        return Code(expr, owner.static, form=owner.form) if _is_cut(index) else item_in(expr, owner)
    return None


def _of_table(owner: Global, index: Value, frame: Frame) -> Value | None:
    """Return what a constant or this config names of a table or a list: a class or function, a table of
    them, a slice, or a switch, as it is where nobody has turned it.
    """
    if not isinstance(index, Known | Setting) or not frame.translator.specialised:
        return None
    if isinstance(index.value, slice):
        return gathered.cut(owner, index.value)
    table = _by_key(owner.obj)
    entry = table.get(index.value)
    if isinstance(table, ClassInstantier) and isinstance(entry, tuple):
        entry = entry[0]  # with its options
    if not _has_own(entry, frame):  # others' tables stay as they are written
        return Known(entry) if isinstance(entry, bool) and isinstance(index, Known) else None
    if isinstance(index, Setting) and config_values.chosen(table, index, frame) is None:
        return None
    return _entry(owner, index.value, frame)


def _chosen_here(owner: Global, key: Value, frame: Frame) -> Value | None:
    """Return what this config takes of a table of classes, or of tables of them, or of names, where
    branches on it are decided.
    """
    table = _by_key(owner.obj)
    if not frame.translator.specialised or not (
        all(_has_own(item, frame) for item in table.values()) or _names_others(table)
    ):
        return None
    chosen = _asked(table, key, frame)
    return _entry(owner, chosen[0], frame) if chosen else None


def _asked(table: Collection[Any], key: Value, frame: Frame) -> Sequence[Any] | None:
    """Return the one of these keys that this config's is, as a guard has it; none where it is no
    one, None where that cannot be told.
    """
    for item in table:
        test = _is_key(key, item)
        try:
            if not frame.translator.decide(test.expr, test, frame):
                continue
        except Untranslatable:
            return None
        frame.translator.guard(test.expr, frame)
        return [item]
    return []


def got_of_table(owner: Global, args: Args, frame: Frame) -> Value | None:
    """Return what `table.get(key, other)` gives of a table of the repository's classes or functions:
    what a constant or this config names, else the other one; None where that is not told.
    """
    if args.keywords or args.stars or not 1 <= len(args.positional) <= 2:
        return None
    key, *others = args.positional
    table = _by_key(owner.obj)
    own = bool(table) and all(_has_own(item, frame) for item in table.values())
    if not own or not frame.translator.specialised:
        return None
    if isinstance(key, Known):
        absent = key.value not in table
    elif key.is_static and (chosen := _chosen_here(owner, key, frame)) is not None:
        return chosen
    else:
        absent = all(decided_here(_is_key(key, item), frame) is False for item in table)
    if not absent:
        return _of_table(owner, key, frame)
    return others[0] if others else NONE


def got_of_mapping(owner: Mapping, args: Args, frame: Frame) -> Value | None:
    """Return what `{key: entry, ...}.get(key, other)` gives for a key of this config's; None where that
    is not told.
    """
    if args.keywords or args.stars or not 1 <= len(args.positional) <= 2:
        return None
    key, *others = args.positional
    if isinstance(key, Known) or not key.is_static or not frame.translator.specialised:
        return None
    if (chosen := _asked(owner.items, key, frame)) is None:
        return None
    if chosen:
        return owner.items[chosen[0]]
    absent = ast.Compare(key.code(), [ast.NotIn()], [constant(tuple(owner.items))])
    frame.translator.guard(absent, frame)
    return others[0] if others else NONE


def _asked_for(table: dict[Any, Any], key: Value, frame: Frame) -> dict[Any, Any]:
    """Return a table without the repository's classes that no layer of this config asks for, where
    branches on it are decided: what these do need not be known. The constructor asserts it.
    """
    if not frame.translator.specialised or frame.kind != "init":
        return table
    return {
        item: entry
        for item, entry in table.items()
        if _is_of_torch(entry)
        or not objects.is_own(entry, frame)
        or decided_here(_is_key(key, item), frame) is not False
    }


def _is_of_torch(entry: object) -> bool:
    """Whether an entry of a table is PyTorch's, which needs no reading."""
    return str(getattr(entry, "__module__", "")).split(".")[0] == "torch"


def _is_key(key: Value, item: Any) -> Code:
    return Code(ast.Compare(key.code(), [ast.Eq()], [constant(item)]), static=True)


def _by_key(table: Any) -> dict[Any, Any]:
    return table if isinstance(table, dict) else dict(enumerate(table))


def _has_own(entry: object, frame: Frame) -> bool:
    """Whether an entry of a table is a class or function of the repository's, or a table of them."""
    if isinstance(entry, dict | list | tuple):
        entries = _by_key(entry).values()
        return bool(entries) and all(objects.is_own(item, frame) for item in entries)
    return objects.is_own(entry, frame)


def _names_others(table: dict[Any, Any]) -> bool:
    """Whether a table has texts alone, other names for those that it is asked for."""
    return bool(table) and all(isinstance(item, str) for item in (*table, *table.values()))


def _entry(owner: Global, key: Any, frame: Frame) -> Value:
    if isinstance(owner.obj, ClassInstantier):
        return _made_by(owner.obj, key, frame)
    entry = _by_key(owner.obj)[key]
    if isinstance(entry, str):
        return Known(entry)
    if isinstance(entry, dict | list | tuple):
        return Global(entry, ast.Subscript(owner.expr, constant(key), ast.Load()))
    return objects.of_table(entry, frame)


def _made_by(table: ClassInstantier, key: Any, frame: Frame) -> Value:
    """Return the module that a table of classes makes whenever it is asked for one."""
    entry = dict.__getitem__(table, key)
    cls, options = entry if isinstance(entry, tuple) else (entry, {})
    made = ast.Call(
        objects.of_table(cls, frame).code(),
        [],
        [ast.keyword(name, constant(value)) for name, value in options.items()],
    )
    return Instance((Made(cls, {name: Known(value) for name, value in options.items()}),), made)


def _of_mapping(owner: Mapping, index: Value, node: ast.Subscript, frame: Frame) -> Value | None:
    """Return an item of a dict; for a key that differs between configs, what all of its items
    are.
    """
    if any(isinstance(item, Global) for item in owner.items.values()):
        index = config_values.as_name(index, frame)
    if isinstance(index, Known):
        if index.value not in owner.items:
            raise Untranslatable(
                f"the missing key {index.value!r} at {frame.source.location(node)}"
            )
        return owner.items[index.value]
    values = list(owner.items.values())
    if values and all(isinstance(value, ByName) for value in values):
        return listed_objects.entry_of(owner.items, index)
    if values and all(value.equals(values[0]) for value in values):
        return values[0]
    if values and all(isinstance(value, Mask) for value in values):
        return PaddingMask()
    if values and all(isinstance(value, MaskMaker) for value in values):
        return MaskMaker(padding=True)
    return None


def _rows(owner: Value, rest: list[Value]) -> Code:
    """Return rows of a table with one more dimension in front, which the batch already is, and
    others among its own.
    """
    own = [place for place, item in enumerate(rest) if not item.equals(NONE)]
    kept = [rest[place] for place in own]
    if kept and _is_text(kept[0]):
        kept = kept[1:]  # as many as there are tokens
    if not _keeps_everything(tuple(kept)):
        raise Untranslatable("a part of a table of positions")
    if len(own) == len(rest):
        return Code(owner.code(), form=ROWS)
    parts: list[ast.expr] = [
        ast.Slice() if place in own else ast.Constant(None) for place in range(len(rest))
    ]
    while isinstance(parts[-1], ast.Slice):
        parts.pop()
    index = ast.Tuple([ast.Slice(), *parts], ast.Load())
    form = ROWS_OF_HEADS if len(parts) == 1 else None
    return Code(ast.Subscript(owner.code(), index, ast.Load()), form=form)


def _is_text(part: Value) -> bool:
    """Whether an index is `:length`, of a length that is known at run time only."""
    match part:
        case Code(expr=ast.Slice(lower=None | ast.Constant(value=0), step=None), static=False):
            return True
    return False


def _of_each_row(rows: Code, rest: list[Value], node: ast.Subscript) -> Code:
    """Return parts of each row of a table, or rows with a dimension more."""
    if _keeps_everything(tuple(rest)):
        return rows
    if not all(isinstance(item, Known) for item in rest) or not isinstance(node.slice, ast.Tuple):
        raise Untranslatable("a part of a table of positions")
    index = ast.Tuple([ast.Slice(), *node.slice.elts], ast.Load())
    return Code(ast.Subscript(rows.expr, index, ast.Load()), form=ROWS)


def _cuts_corner(index: ast.expr) -> bool:
    """Whether an index is [:a, :b, ...], or [b - a : b, :b]: the last rows of a corner, whose
    queries are the last of its keys. Dimensions of size one may be put before these.
    """
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    while parts and isinstance(parts[0], ast.Constant) and parts[0].value is None:
        parts = parts[1:]
    return all(
        isinstance(part, ast.Slice)
        and part.step is None
        and (part.lower is None or (place == len(parts) - 2 and _ends_with(part, parts[-1])))
        for place, part in enumerate(parts)
    )


def _ends_with(rows: ast.Slice, keys: ast.expr) -> bool:
    """Whether rows are `b - a : b` and keys `: b`."""
    match rows, keys:
        case (
            ast.Slice(lower=ast.BinOp(left=end, op=ast.Sub()), upper=ast.expr() as stop),
            ast.Slice(lower=None, upper=ast.expr() as last),
        ):
            return same_code(end, stop) and same_code(stop, last)
    return False


def _keeps_everything(parts: tuple[Value, ...]) -> bool:
    """Whether an index is [:, :, ...]."""
    return all(
        isinstance(part, Known) and part.value in (slice(0, None), slice(None)) for part in parts
    )


def _index_code(node: ast.expr, value: Value, frame: Frame) -> ast.expr:
    """Return an index as it is written: slices keep their colons."""
    if isinstance(node, ast.Slice):
        return slice_code(node, frame)
    if isinstance(node, ast.Tuple) and isinstance(value, Items):
        parts = [
            slice_code(item, frame) if isinstance(item, ast.Slice) else part.code()
            for item, part in zip(node.elts, value.items, strict=True)
        ]
        return ast.Tuple(parts, ast.Load())
    return value.code()


def slice_code(node: ast.Slice, frame: Frame) -> ast.Slice:
    """Return a slice as code."""
    bounds = [
        None if item is None else frame.code(item) for item in (node.lower, node.upper, node.step)
    ]
    return ast.Slice(*bounds)


def index_code(node: ast.expr, frame: Frame) -> ast.expr:
    """Return the code of an index, whose slices are written as such."""
    match node:
        case ast.Slice():
            return slice_code(node, frame)
        case ast.Tuple(elts=parts):
            return ast.Tuple([index_code(part, frame) for part in parts], ast.Load())
    return frame.code(node)
