"""Variables that hold objects of repositories' code: what their fields are is in variables of their
own, `state_x` of `state.x`, which loops may change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from onboard.codegen.translate.language.args import spread
from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.forms import LIST, TENSORS, TUPLE
from onboard.codegen.translate.language.frame import GIVEN, Frame
from onboard.codegen.translate.language.handed.by_name import ByName, Output
from onboard.codegen.translate.language.handed.left_in_arguments import Left, Path
from onboard.codegen.translate.language.holes import Hole, Result
from onboard.codegen.translate.language.sequences import at_run_time, sequence_of_all
from onboard.codegen.translate.language.trees.syntax import Untranslatable, mentions, name
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Unread, Value

_DISPLAYS: dict[str, type[ast.List | ast.Tuple]] = {
    LIST: ast.List,
    TUPLE: ast.Tuple,
    TENSORS: ast.Tuple,
}
"""How a sequence of a form is written out."""


def bind(variable: str, value: ByName, frame: Frame, origin: ast.AST) -> None:
    """Assign an object to a variable, and to others what is computed of its fields."""
    targets = _targets(variable, variable, value, frame)
    frame.env.values[variable] = NONE
    frame.env.values[variable] = _assigned(variable, value, targets, frame, origin)


def bind_result(variable: str, result: Result, frame: Frame, origin: ast.AST) -> None:
    """Assign an object that a call gives to a variable, and to others its fields."""
    fields = spread({variable: result.shape})
    holes = {part.index: field for field, part in fields.items() if isinstance(part, Hole)}
    if len(holes) != result.holes:
        value = frame.settle(result)
        assert isinstance(value, ByName)
        return bind(variable, value, frame, origin)
    names = [
        _carried(variable, holes[index], frame) or frame.fresh(holes[index])
        for index in range(result.holes)
    ]
    frame.env.values[variable] = NONE
    for own in names:
        frame.protect(own, origin)
    frame.env.values[variable] = frame.bind_result(result, names, origin)
    return None


def widened(variable: str, value: ByName, end: Value, frame: Frame, origin: ast.AST) -> bool:
    """Have an object be what a loop leaves in it, too, which is `end`; return whether both are of one
    kind.
    """
    if not value.is_like(end):
        return False
    before, after = (spread({variable: item}) for item in (value, end))
    if before.keys() != after.keys():
        return False
    places = places_of(value, frame.env.values)
    if sum(not place.startswith(GIVEN) for place in places) > 1:
        raise Untranslatable(f"{variable}, which a loop changes, and which has another name, too")
    changed = [field for field, part in before.items() if not part.equals(after[field])]
    lazy = {field: after[field] for field in changed if isinstance(after[field], Left)}
    targets = {field: frame.fresh(field) for field in changed if field not in lazy}
    frame.env.values[variable] = NONE
    forms = {field: sequence_of_all((before[field], after[field])) for field in targets}
    growing = _with(variable, value, _as_lists(before, forms))
    made = _assigned(variable, growing, targets, frame, origin)
    optional = {field for field in changed if before[field].may_be_none or after[field].may_be_none}
    known = {
        field: replace(part, form=forms[field], static=False, optional=field in optional)
        for field, part in spread({variable: made}).items()
        if field in targets and isinstance(part, Code)
    }
    made = _with(variable, made, known | lazy)
    held = {place: frame.env.values[place] for place in places if place != variable}
    frame.env.values |= {key: _in_place_of(value, made, item) for key, item in held.items()}
    frame.env.values[variable] = made
    return True


def _as_lists(parts: Mapping[str, Value], forms: Mapping[str, str | None]) -> dict[str, Value]:
    """Return the lists and tuples of known length that a loop fills as ones of any."""
    return {
        field: Code(made([item.code() for item in part.items], ast.Load()), form=forms[field])
        for field, part in parts.items()
        if isinstance(part, Items) and (made := _DISPLAYS.get(forms.get(field) or ""))
    }


def carry(start: Env, frame: Frame, origin: ast.AST) -> None:
    """Assign what a loop's body has left in fields of objects to the variables that carry these from
    turn to turn.
    """
    for variable, before in start.values.items():
        end = frame.env.values.get(variable, NONE)
        if not (variable.isidentifier() and isinstance(before, ByName) and before.is_like(end)):
            continue
        targets = {}
        old = spread({variable: before})
        for field, part in spread({variable: end}).items():
            known = _carried(variable, field, frame)
            if known and isinstance(part, Code | Known) and not part.equals(old.get(field, NONE)):
                targets[field] = known
        if targets:
            emptied = end.having({})
            _swap(end, emptied, frame)
            _swap(emptied, _assigned(variable, end, targets, frame, origin), frame)


def put(
    owner: ByName,
    attr: str,
    value: Value,
    frame: Frame,
    place: str = "",
    origin: ast.AST | None = None,
) -> None:
    """Put a value into a field of an object, for all that hold it.

    Args:
        place: the variable that code calls the object by; "": it is none.
        origin: the statement.

    Raises:
        Untranslatable: who calls this function has it, too.
    """
    note(owner, [(attr,)], frame)
    emptied = owner.having({**owner.entries, attr: NONE})
    places = _swap(owner, emptied, frame)
    if frame.translator.specialised and place:
        place = _name_of(emptied, [place, *places], frame)
        field = f"{place}_{attr}"
        value = _assigned(field, value, _targets(place, field, value, frame), frame, origin)
    changed = owner.having({**owner.entries, attr: value})
    _swap(emptied, changed, frame)
    _store(changed, frame, origin)


def _store(changed: Value, frame: Frame, origin: ast.AST | None) -> None:
    """Put an object that has changed into the list that it is from."""
    if isinstance(changed, Output) and changed.stored is not None:
        frame.emit(changed.stored(changed), origin)


def held(frame: Frame) -> dict[str, Value]:
    """Return what has become of the objects that a function was given."""
    return {key: value for key, value in frame.env.values.items() if key.startswith(GIVEN)}


def rebind(owner: Value, changed: Value, frame: Frame, origin: ast.AST | None = None) -> None:
    """Have whatever holds a list or a dict hold what has become of it; variables that hold it are
    assigned that.

    Raises:
        Untranslatable: it is kept where nothing else can be put.
    """
    note(owner, [()], frame)
    places = places_of(owner, frame.env.values)
    if not places and isinstance(owner, Code) and isinstance(owner.expr, ast.Attribute):
        raise Untranslatable(f"a change of {ast.unparse(owner.expr)}, which a module keeps")
    for place in places:
        if place.isidentifier() and frame.env.values[place] is owner:
            if isinstance(changed, Left | Unread):
                frame.env.values[place] = changed
            else:
                frame.bind(place, _as_carried(place, changed, frame), origin)
                changed = frame.env.values[place]
    for place in places:
        frame.env.values[place] = _in_place_of(owner, changed, frame.env.values[place])


def _as_carried(variable: str, changed: Value, frame: Frame) -> Value:
    """Return a list as one of any length, where a loop around carries such a one from turn to turn."""
    known = [start.values.get(variable) for start in frame.loops]
    any_length = any(isinstance(each, Code) and each.form == LIST for each in known)
    return (at_run_time(changed) if any_length else None) or changed


def note(owner: Value, paths: Sequence[Path], frame: Frame) -> None:
    """Note that parts of an object change, by their paths from it, where a function was given it."""
    for key, value in held(frame).items():
        for start in _paths(owner, value):
            ways = ((key.removeprefix(GIVEN), *start, *path) for path in paths)
            frame.changed |= dict.fromkeys(ways)


def _paths(owner: Value, value: Value) -> Iterator[Path]:
    """Yield the paths on which an object lies in a value."""
    if value is owner:
        yield ()
    elif isinstance(value, ByName):
        for key, part in value.entries.items():
            yield from ((key, *path) for path in _paths(owner, part))


def replaced(owner: ByName, changed: Value, frame: Frame) -> None:
    """Have whatever holds an object hold what a method has made of it."""
    emptied = owner.having({})
    places = _swap(owner, emptied, frame)
    if frame.loops and frame.translator.specialised:
        place = _name_of(emptied, places, frame)
        targets = _targets(place, place, changed, frame)
        changed = _assigned(place, changed, targets, frame, None)
    _swap(emptied, changed, frame)
    _store(changed, frame, None)


def _name_of(held: Value, places: Sequence[str], frame: Frame) -> str:
    """Return the variable that loops carry an object in, of those that hold it; else the first one."""
    named = [key for key in places if key.isidentifier() and frame.env.values.get(key) is held]
    for key in named:
        before = [spread({key: start.values.get(key, NONE)}) for start in frame.loops]
        if any(_carried(key, field, frame) for fields in before for field in fields):
            return key
    return [*named, *places, "held"][0]


def _swap(owner: Value, changed: Value, frame: Frame) -> list[str]:
    """Have whatever holds an object hold another one; return where that is."""
    if not (isinstance(owner, Output) and owner.stored):
        _refuse_given(owner)
    kept = {} if frame.cls is None else frame.cls.attributes
    known = {f"self.{key}": item for key, item in kept.items()} | frame.env.values
    places = places_of(owner, known)
    for place in places:
        frame.env.values[place] = _in_place_of(owner, changed, known[place])
    return places


def places_of(owner: Value, known: Mapping[str, Value]) -> list[str]:
    """Return where an object is held, by itself or in another one."""
    return [place for place, item in known.items() if _in_place_of(owner, NONE, item) is not item]


def _in_place_of(owner: Value, changed: Value, item: Value) -> Value:
    """Return a value with another object in it; itself where the object is not in it."""
    if item is owner:
        return changed
    parts = [_in_place_of(owner, changed, part) for part in item.parts()]
    if all(new is old for new, old in zip(parts, item.parts(), strict=True)):
        return item
    _refuse_given(item)
    left = iter(parts)
    return item.mapped(lambda _: next(left))


def _refuse_given(item: Value) -> None:
    """Raise `Untranslatable` where who calls the function has what changes, too."""
    if isinstance(item, Output) and item.given:
        cls = "an object" if item.cls is None else f"{item.cls.__name__}(...)"
        raise Untranslatable(f"a change of {cls}, which others have, too")


def _targets(variable: str, place: str, value: Value, frame: Frame) -> dict[str, str]:
    """Return the variables that fields are assigned to, of a value at a place of a variable's."""
    targets: dict[str, str] = {}
    for field, part in spread({place: value}).items():
        if (target := _target(variable, field, part, frame)) is not None:
            targets[field] = target
    return targets


def _target(variable: str, field: str, part: Value, frame: Frame) -> str | None:
    """Return the variable that a field is assigned to; None: it needs none."""
    if (carried := _carried(variable, field, frame)) is not None:
        return carried
    if not isinstance(part, Code) or part.static or part.masked or part.unread or part.lazy:
        return None
    plain = isinstance(part.expr, ast.Name | ast.Attribute | ast.Constant)
    return None if plain else frame.fresh(field)


def _carried(variable: str, field: str, frame: Frame) -> str | None:
    """Return the variable that a loop around carries a field in from turn to turn."""
    for start in reversed(frame.loops):
        match spread({variable: start.values.get(variable, NONE)}).get(field):
            case Code(expr=ast.Name(id=known)) if re.fullmatch(rf"{field}(_\d+)?", known):
                return known
    return None


def _assigned(
    place: str, value: Value, targets: Mapping[str, str], frame: Frame, origin: ast.AST | None
) -> Value:
    """Assign fields of what lies at a place to the variables that are their targets; return it with
    these.
    """
    parts = spread({place: value})
    made: dict[str, Value] = {}
    for target in targets.values():
        frame.protect(target, origin)
    pairs = [
        (target, parts[field].code())
        for field, target in targets.items()
        if ast.unparse(parts[field].code()) != target
    ]
    for field, target in targets.items():
        part = parts[field]
        now = part if isinstance(part, Code) else Code(part.code())
        made[field] = replace(now, expr=name(target), transposed=False)
        frame.env.values[target] = made[field]
    rest = [(target, code) for i, (target, _) in enumerate(pairs) for _, code in pairs[i + 1 :]]
    if any(mentions(code, target) for target, code in rest):
        stores = ast.Tuple([name(target, store=True) for target, _ in pairs], ast.Store())
        codes = ast.Tuple([code for _, code in pairs], ast.Load())
        frame.emit(ast.Assign([stores], codes), origin)
    else:
        for target, code in pairs:
            frame.emit(ast.Assign([name(target, store=True)], code), origin)
    return _with(place, value, made)


def _with(place: str, value: Value, changed: Mapping[str, Value]) -> Value:
    """Return an object with other values of some fields, by their variables."""
    if isinstance(value, ByName):
        parts = {key: _with(f"{place}_{key}", part, changed) for key, part in value.entries.items()}
        same = all(parts[key] is part for key, part in value.entries.items())
        return value if same else value.having(parts)
    return changed.get(place, value)
