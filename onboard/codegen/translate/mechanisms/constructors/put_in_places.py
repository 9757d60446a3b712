"""A constructor that puts other modules in places that names in the config say.

Code looks for the places first: it walks all modules with a stack, and notes of each who has it and
under which name. Nothing of that is written: a path says where a module is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onboard.analysis.source import plain_class
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Instance, ModuleList, joined_ways
from onboard.codegen.translate.language.state import ClassState, Restart
from onboard.codegen.translate.language.statements.assignments.kept import put_by_path
from onboard.codegen.translate.language.statements.execute import execute
from onboard.codegen.translate.language.statements.loops.turns import turn
from onboard.codegen.translate.language.trees.syntax import Untranslatable, call, name
from onboard.codegen.translate.language.values import Code, Value

FUNCTION = "put_in_place"
_LOOKING = {
    *("named_modules", "named_children", "modules", "children", "items", "keys", "values"),
    *("pop", "append", "isinstance", "len", "list", "dict", "enumerate"),
}
"""What is called by statements that only look for places."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, eq=False)
class _Part(Code):
    """The module that is found at a place; its bias may be None, its sizes are numbers."""


class PutInPlaces(Mechanism):
    """`for name, part in self.named_modules(): if ...: setattr(parent, attr, Other(...))`."""

    def attribute(self, owner: Value, attr: str, frame: Frame) -> Value | None:
        """Return an attribute of the module that is found at a place."""
        if not isinstance(owner, _Part):
            return None
        path = ast.Attribute(owner.expr, attr, ast.Load())
        return Code(path, static=True, optional=attr == "bias")

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """A loop that puts modules in places by their paths, without the search for these."""
        if frame.kind != "init" or frame.cls is None or not frame.translator.specialised:
            return None
        found = next((i for i, each in enumerate(statements) if _puts(each)), None)
        if found is None or not all(map(_looks, statements[:found])):
            return None
        noted = {key for each in statements[:found] for key in _stored(each)}
        loop, after = statements[found], statements[found + 1 :]
        if noted & {key for each in after for key in _read(each)}:
            return None
        assert isinstance(loop, ast.For)
        _write(loop, noted, frame)
        return after


def _puts(node: ast.stmt) -> bool:
    """Whether a statement is such a loop."""
    match node:
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(), ast.Name()]),
            iter=walked,
            body=[ast.If(body=[*before, ast.Expr(value=put)], orelse=[])],
            orelse=[],
        ):
            plain = all(isinstance(each, ast.Assign) for each in before)
            whole = ast.unparse(walked).removeprefix("list(").removesuffix(")").rstrip("(")
            return plain and whole == "self.named_modules" and _is_put(put)
    return False


def _is_put(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="setattr"), args=[_, _, _], keywords=[]):
            return True
    return False


def _looks(node: ast.stmt) -> bool:
    """Whether a statement of a constructor only looks at modules, and notes what it sees in
    variables of its own.
    """
    match node:
        case ast.Assign(targets=targets):
            return all(map(_is_own, targets)) and _only_looks(node.value)
        case ast.For(target=target, iter=inside, body=body, orelse=orelse):
            return _only_looks(target, inside) and all(map(_looks, (*body, *orelse)))
        case (
            ast.While(test=inside, body=body, orelse=orelse)
            | ast.If(test=inside, body=body, orelse=orelse)
        ):
            return _only_looks(inside) and all(map(_looks, (*body, *orelse)))
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=key))) as value):
            return key != "self" and _only_looks(value)
    return isinstance(node, ast.Pass | ast.Continue)


def _is_own(target: ast.expr) -> bool:
    """Whether a variable, or an item of one, is assigned."""
    match target:
        case ast.Name() | ast.Subscript(value=ast.Name()):
            return True
        case ast.Tuple(elts=parts):
            return all(map(_is_own, parts))
    return False


def _only_looks(*nodes: ast.expr) -> bool:
    for item in (each for node in nodes for each in ast.walk(node)):
        if isinstance(item, ast.Lambda | ast.NamedExpr):
            return False
        if isinstance(item, ast.Call):
            called = ast.unparse(item.func).rpartition(".")[2]
            if called not in _LOOKING:
                return False
    return True


def _stored(node: ast.AST) -> Iterator[str]:
    for item in ast.walk(node):
        match item:
            case (
                ast.Name(id=key, ctx=ast.Store())
                | ast.Subscript(value=ast.Name(id=key), ctx=ast.Store())
            ):
                yield key


def _read(node: ast.AST) -> Iterator[str]:
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load):
            yield item.id


def _write(loop: ast.For, noted: set[str], frame: Frame) -> None:
    """Write the loop with the paths of modules for the places that it looked up."""
    match loop:
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(id=path), ast.Name(id=part)]),
            body=[ast.If(test=test, body=[*before, ast.Expr(value=ast.Call(args=[*_, new]))])],
        ):
            pass
        case _:
            raise AssertionError(ast.unparse(loop))
    noted = noted - {path, part}
    with frame.branch(frame.env.copy()) as body, turn(loop, frame.env, frame):
        frame.env.values[path] = Code(name(path), static=True)
        frame.env.values[part] = _Part(name(part), static=True)
        asked = frame.evaluate(test)
        for statement in before:
            if noted & {*_read(statement)}:
                noted |= {*_stored(statement)}  # a note of the place
            else:
                execute([statement], frame)
        made = frame.evaluate(new)
    if body or not isinstance(made, Instance) or not asked.is_static:
        raise Untranslatable(f"a module that is put in a place at {frame.source.location(loop)}")
    places = ast.Tuple([ast.Constant(key) for key in _join(made, frame, loop)], ast.Load())
    put = ast.Expr(call(name(FUNCTION), name("self"), name(path), made.code(), places))
    walked = ast.parse(f"for {path}, {part} in list(self.named_modules()): pass").body[0]
    assert isinstance(walked, ast.For)
    walked.body = [ast.If(asked.code(), [put], [])]
    frame.emit(walked, loop)


def _join(made: Instance, frame: Frame, loop: ast.For) -> list[str]:
    """Have the modules of all such places be made in either way; return these places: the classes
    that have them, and their names there.

    Such a place is one where the small model has the new module, or one of a name in the config,
    whatever the number of its layer is.
    """
    assert frame.cls is not None
    named = {_NUMBER.sub("*", text) for text in _texts(vars(frame.translator.config))}
    roots = frame.translator.modules_of(frame.cls.cls)
    paths: dict[str, type] = {}
    for root in roots:
        for path, module in root.named_modules():
            new = plain_class(type(module)) in made.classes
            if new or (path and _NUMBER.sub("*", path) in named):
                paths[path] = plain_class(type(root.get_submodule(path.rpartition(".")[0])))
    if not any(
        plain_class(type(item)) in made.classes for root in roots for item in root.modules()
    ):
        what = f"{made.classes[0].__name__}, which no small model has"
        raise Untranslatable(f"{what}, at {frame.source.location(loop)}")
    by_path = {(owner, path.rpartition(".")[2]) for path, owner in paths.items()}
    known = put_by_path(frame.translator.model)
    if not by_path <= known:
        known |= by_path
        raise Restart
    for path in paths:
        owner, _, attr = path.rpartition(".")
        for state in _states(owner.split(".") if owner else [], frame):
            _join_at(state, attr, made, path)
    return sorted({f"{owner.__name__}.{attr}" for owner, attr in by_path})


def _join_at(state: ClassState, attr: str, made: Instance, path: str) -> None:
    before = state.attributes.get(attr)
    if not isinstance(before, Instance):
        raise Untranslatable(f"a module that is put in the place of {path}")
    state.attributes[attr] = replace(before, made=joined_ways(before.made, made.made))


def _states(path: Sequence[str], frame: Frame) -> list[ClassState]:
    """Return the translations of the classes that the module at a path may be of."""
    assert frame.cls is not None
    if not path:
        return [frame.cls]
    first, *others = path
    found = [frame.evaluate(ast.parse(f"self.{first}", mode="eval").body)]
    for step in (*others, ""):
        if step.isdigit():
            continue
        states = [state for value in found for state in _reached(value, frame)]
        if step:
            found = [state.attributes[step] for state in states if step in state.attributes]
    return states


def _reached(value: Value, frame: Frame) -> list[ClassState]:
    if not isinstance(value, Instance | ModuleList):
        return []
    ways = tuple(way for way in value.made if frame.translator.translates(way.cls))
    return frame.translator.reached(Instance(ways, value.expr))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value of the config, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _texts(item)
