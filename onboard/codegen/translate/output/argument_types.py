"""Types of parameters and results that are no tensors: numbers, dicts, what may be left out."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from onboard.codegen.translate.language.program.argument_facts import default_nodes
from onboard.codegen.translate.language.state import Routine

SIMPLE = {"int", "float", "bool", "str"}
ANY_DICT = "dict[str, Any]"
_SIZED = {
    "range",
    "arange",
    "view",
    "reshape",
    "expand",
    "repeat",
    "split",
    "zeros",
    "ones",
    "empty",
}


def written(node: ast.FunctionDef, key: str) -> str | None:
    """Return the plain type that a definition gives a parameter, by annotation or default; None: it
    says nothing.
    """
    annotation = _annotation(node, key)
    text = ast.unparse(annotation) if annotation is not None else ""
    simple = [part.strip() for part in text.split("|") if part.strip() in SIMPLE]
    default = default_nodes(node).get(key) or _default_asked(node, key)
    if not simple and isinstance(default, ast.Constant) and type(default.value).__name__ in SIMPLE:
        return type(default.value).__name__
    return " | ".join(simple) or None


def _annotation(node: ast.FunctionDef, key: str) -> ast.expr | None:
    """Return a parameter's annotation; what falls into `**kwargs` has none."""
    own = (item for item in (*node.args.args, *node.args.kwonlyargs) if item.arg == key)
    return next((item.annotation for item in own), None)


def _default_asked(node: ast.FunctionDef, key: str) -> ast.expr | None:
    """Return the default that code names where it asks `**kwargs` for a key."""
    for item in ast.walk(node):
        match item:
            case ast.Call(
                func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=asked), default]
            ) if asked == key:
                return default
    return None


def of_module(node: ast.FunctionDef, key: str) -> str:
    """Return the type of a parameter of a module's `__init__`: what is not said or told by its use
    is a size.
    """
    if (said := written(node, key)) is not None:
        return said
    if any(_reads_as_dict(item, key) for item in ast.walk(node)):
        return ANY_DICT
    return "str" if any(_is_asked_for_text(item, key) for item in ast.walk(node)) else "int"


def in_use(node: ast.FunctionDef, key: str) -> str:
    """Return a parameter's type as the code of its function tells it; one without annotation may
    have a default of 1 and stand for any number.
    """
    said = written(node, key)
    if said not in (None, "int") or (said == "int" and _annotation(node, key) is not None):
        return said
    if any(_reads_as_dict(item, key) for item in ast.walk(node)):
        return ANY_DICT
    sizes = any(key in names for names in _sizes(node))
    return (
        "float" if not sizes and any(_calculates(item, key) for item in ast.walk(node)) else "int"
    )


def returned(node: ast.FunctionDef, types: dict[str, str]) -> str:
    """Return the type of a function that returns no tensor; `types` are those of its parameters."""
    values = [
        item.value
        for item in ast.walk(node)
        if isinstance(item, ast.Return) and item.value is not None
    ]
    kinds = {_kind(value, types) for value in values}
    return kinds.pop() if len(kinds) == 1 else "float" if kinds == {"int", "float"} else "Any"


def _kind(value: ast.expr, types: dict[str, str]) -> str:
    match value:
        case ast.Constant(value=known) if type(known).__name__ in SIMPLE:
            return type(known).__name__
        case ast.Name(id=variable):
            return types.get(variable, "Any")
        case (
            ast.BinOp(op=ast.Div() | ast.Pow())
            | ast.Call(func=ast.Attribute(value=ast.Name(id="math")))
        ):
            return "float"
        case ast.BinOp(left=left, right=right):
            kinds = {_kind(left, types), _kind(right, types)}
            return "float" if "float" in kinds else kinds.pop() if len(kinds) == 1 else "Any"
    return "Any"


def _reads_as_dict(node: ast.AST, key: str) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id=variable), attr="get" | "items" | "keys"):
            return variable == key
        case ast.Subscript(value=ast.Name(id=variable), slice=ast.Constant(value=str())):
            return variable == key
    return False


def _is_asked_for_text(node: ast.AST, key: str) -> bool:
    match node:
        case ast.Compare(left=ast.Name(id=variable), comparators=[ast.Constant(value=str())]):
            return variable == key
    return False


def _sizes(node: ast.FunctionDef) -> Iterator[set[str]]:
    """Yield the variables in sizes of tensors, ranges and slices."""
    for item in ast.walk(node):
        match item:
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if (
                called in _SIZED
            ):
                yield {
                    part.id
                    for argument in item.args
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Name)
                }
            case ast.Slice():
                yield {part.id for part in ast.walk(item) if isinstance(part, ast.Name)}


def _calculates(node: ast.AST, key: str) -> bool:
    operands = {ast.BinOp: ("left", "right"), ast.Compare: ("left",)}.get(type(node), ())
    return any(
        isinstance(part := getattr(node, side), ast.Name) and part.id == key for side in operands
    )


def last_defaults(routine: Routine) -> dict[str, str]:
    """Return ` = value` of the last parameters that have a truth value, a number or a text by
    default, as some calls leave them out.
    """
    found: dict[str, str] = {}
    defaults = default_nodes(routine.node)
    for parameter in reversed(routine.parameters):
        default = defaults.get(parameter)
        if not isinstance(default, ast.Constant) or default.value is None:
            break
        if parameter in routine.optional:
            break
        found[parameter] = f" = {ast.unparse(default)}"
    return found


def or_none(parameter: str, kind: str, routine: Routine, given: Collection[str] = ()) -> str:
    """Return a parameter's type where it may be None, too; the last ones of these, and of those that
    are `given` a default, may be left out.
    """
    if parameter not in routine.optional:
        return kind
    after = routine.parameters[routine.parameters.index(parameter) :]
    default = " = None" if {*routine.optional, *given}.issuperset(after) else ""
    return f"{kind.removesuffix(' | None')} | None{default}"
