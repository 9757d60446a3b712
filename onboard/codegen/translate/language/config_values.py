"""Values that come from the config: code of repositories is translated with what this config has,
and the generated class asserts it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.object_values import Config, Global
from onboard.codegen.translate.language.trees.syntax import attribute, call, constant, name
from onboard.codegen.translate.language.values import Code, Known, Mapping, Value
from onboard.hf.config_field import config_field
from onboard.hf.young_fields import young_default

_TABLES = (dict, list, tuple, set, frozenset)
_TEXT = {"lower", "upper", "strip", "startswith", "endswith"}
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


@dataclass(frozen=True, eq=False)
class Setting(Code):
    """A field of the config, or an item of one: this config has `value` there."""

    value: Any = None
    origin: ast.expr | None = None
    """How the constructor of the class reads it, whatever becomes of it there."""
    typed = True

    def same_fact(self, other: Value) -> bool:
        """Whether both have the same value."""
        same = isinstance(other, Setting) and type(self.value) is type(other.value)
        return same and bool(self.value == other.value)  # type: ignore[attr-defined]

    def joined(self, other: Value) -> Value:
        """Return that both come from the config."""
        return Code(self.expr, self.static).joined(other)

    def as_parameter(self, parameter: str) -> Code:
        """Return it under the parameter's name."""
        return replace(self, expr=name(parameter), origin=name(parameter))

    def item(self, key: str) -> Setting:
        """Return an item of a dict."""
        return self._changed(
            lambda owner: ast.Subscript(owner, ast.Constant(key), ast.Load()), self.value[key]
        )

    def _changed(self, change: Callable[[ast.expr], ast.expr], value: Any) -> Setting:
        assert self.origin is not None
        return setting(change(self.expr), value, change(self.origin))


def setting(expr: ast.expr, value: Any, origin: ast.expr | None = None) -> Setting:
    """Return a value of the config."""
    return Setting(expr, static=True, value=value, origin=expr if origin is None else origin)


def of_field(expr: ast.expr, config: Any, frame: Frame) -> Setting | None:
    """Return a field of the config that is a dict, whose items decide what is made."""
    assert isinstance(expr, ast.Attribute)
    value = config_field(config, expr.attr) if frame.translator.specialised else None
    if type(value) is dict and all(map(_is_text, value)):
        return setting(expr, value)
    return None


def plain_field(owner: ast.expr, attr: str, config: Any) -> Code:
    """Return a field of the config, with the class's default where the class may lack the field in
    another release of transformers.
    """
    default = young_default(config, attr)
    if default is None:
        return Code(attribute(owner, attr), static=True)
    given = [owner, ast.Constant(attr), ast.Constant(default)]
    return Code(call(name("getattr"), *given), static=True)


def all_fields(expr: ast.expr, config: Any) -> Mapping:
    """Return `config.to_dict()`."""
    values, missing = config.to_dict(), object()
    fields = {
        key: values[key] for key in values if config_field(config, key, missing) is not missing
    }
    return Mapping({key: setting(attribute(expr, key), value) for key, value in fields.items()})


def as_mapping(owner: Setting, frame: Frame) -> Mapping:
    """Return a dict of the config with the keys that it has here."""
    assert owner.origin is not None
    keys = sorted(owner.value)
    listed: ast.expr = ast.List([ast.Constant(key) for key in keys], ast.Load())
    frame.translator.guard(
        ast.Compare(call(name("sorted"), owner.origin), [ast.Eq()], [listed]), frame
    )
    return Mapping({key: owner.item(key) for key in owner.value})


def own_copy(owner: Setting | Mapping, frame: Frame) -> Value:
    """Return a copy of a dict, which code may change; of the config's, with the keys that it has
    here.
    """
    if isinstance(owner, Setting):
        return as_mapping(owner, frame) if isinstance(owner.value, dict) else owner
    return Mapping(dict(owner.items))


def changed_copy(owner: Value, method: ast.Attribute, frame: Frame) -> Value:
    """Return a dict of the config's that a constructor takes an item out of as a copy, which its
    variable is from here on: whose dict it is has a copy of it for each module, or nothing reads the
    item again.
    """
    match owner, method:
        case Setting(value=dict()), ast.Attribute(value=ast.Name(id=variable), attr="pop"):
            frame.env.values[variable] = as_mapping(owner, frame)
            return frame.env.values[variable]
    return owner


def as_name(key: Value, frame: Frame) -> Value:
    """Return a text of the config as this config has it, guarded; others as they are."""
    found = _of_config(key, frame)
    text = key if found is None or not isinstance(found.value, str) else found
    return as_constants(Args([text], {}, []), frame).positional[0]


def compared(op: ast.cmpop, left: Value, right: Value, frame: Frame) -> Known | None:
    """Return the value of `left op right` of settings and constants in this config, guarded."""
    sides = (left, right)
    if frame.cls is None or not any(isinstance(side, Setting) for side in sides):
        return None
    if not all(isinstance(side, Setting | Known) for side in sides):
        return None
    try:
        found = bool(_COMPARED[type(op)](*(side.value for side in sides)))  # type: ignore[attr-defined]
    except TypeError:
        return None
    codes = [_read(side) for side in sides]
    return _guarded(ast.Compare(codes[0], [op], [codes[1]]), found, frame)


def is_entry(op: ast.cmpop, left: Value, right: Value, frame: Frame) -> Known | None:
    """Return the value of `config.x in TABLE` of a table of the module or of transformers, guarded by
    what this config has there.
    """
    table = right.obj if isinstance(right, Global) else None
    if not isinstance(op, ast.In | ast.NotIn) or not isinstance(table, _TABLES):
        return None
    found = left if isinstance(left, Setting) else _of_config(left, frame)
    if found is None or frame.cls is None or not isinstance(found.value, str | int | None):
        return None
    _guarded(ast.Compare(_read(found), [ast.Eq()], [constant(found.value)]), True, frame)
    return Known((found.value in table) is isinstance(op, ast.In))


def denied(value: Value, frame: Frame) -> Known | None:
    """Return `not value` of a setting, guarded."""
    if frame.cls is None or not isinstance(value, Setting):
        return None
    return Known(not _guarded(_read(value), bool(value.value), frame).value)


def chosen(table: dict[Any, Any], key: Value, frame: Frame) -> Any:
    """Return `table[key]` of a table of the module and a setting, guarded; None where that is not
    there.
    """
    if frame.cls is None or not isinstance(key, Setting) or key.value not in table:
        return None
    _guarded(ast.Compare(_read(key), [ast.Eq()], [constant(key.value)]), True, frame)
    return table[key.value]


def gives_settings(args: Args) -> bool:
    """Whether a helper is given what comes from the config."""
    return any(isinstance(item, Setting) for item in (*args.positional, *args.keywords.values()))


def as_constants(args: Args, frame: Frame) -> Args:
    """Return a helper's arguments with the texts and truth values that this config has, guarded."""
    if frame.cls is None:
        return args

    def known(value: Value) -> Value:
        if not isinstance(value, Setting) or not isinstance(value.value, bool | str | None):
            return value
        same: ast.cmpop = ast.Eq() if isinstance(value.value, str) else ast.Is()
        _guarded(ast.Compare(_read(value), [same], [constant(value.value)]), True, frame)
        return Known(value.value)

    keywords = {key: known(item) for key, item in args.keywords.items()}
    return replace(args, positional=[known(item) for item in args.positional], keywords=keywords)


def _guarded(test: ast.expr, found: bool, frame: Frame) -> Known:
    frame.translator.guard(test if found else ast.UnaryOp(ast.Not(), test), frame)
    return Known(found)


def _read(side: Value) -> ast.expr:
    if isinstance(side, Setting) and side.origin is not None:
        return side.origin
    return side.code()


def _is_text(key: object) -> bool:
    return isinstance(key, str)


def text_method(owner: Value, attr: str, args: Args, frame: Frame) -> Known | None:
    """Return what a method of a text of the config gives in this config, guarded."""
    found = owner if isinstance(owner, Setting) else _of_config(owner, frame)
    if found is None or frame.cls is None or attr not in _TEXT or not args.known():
        return None
    if not isinstance(found.value, str):
        return None
    _guarded(ast.Compare(_read(found), [ast.Eq()], [constant(found.value)]), True, frame)
    given = [item.value for item in args.positional]  # type: ignore[attr-defined]
    return Known(getattr(found.value, attr)(*given))


def _of_config(owner: Value, frame: Frame) -> Setting | None:
    """Return `config.x` with what it is in this config."""
    match owner:
        case Code(expr=ast.Attribute(value=place, attr=attr), static=True):
            config = frame.env.values.get(ast.unparse(place))
            if isinstance(config, Config) and frame.translator.specialised:
                return setting(owner.expr, getattr(config.obj, attr, None))
    return None
