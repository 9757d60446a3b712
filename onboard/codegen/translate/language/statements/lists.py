"""Lists that code fills: of modules in `__init__`, of tensors in a loop of a forward."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from onboard.codegen.translate.language.config_values import Setting
from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.expressions.comprehensions import comprehension
from onboard.codegen.translate.language.expressions.module_lists import (
    is_row,
    joined,
    parts_of,
    with_row,
)
from onboard.codegen.translate.language.forms import LIST
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed.by_name import ByName
from onboard.codegen.translate.language.handed.containers import entry_name, named
from onboard.codegen.translate.language.handed.listed import Objects, tuple_of
from onboard.codegen.translate.language.object_values import (
    Instance,
    ModuleList,
    ModuleRows,
    ModuleTable,
    Repeated,
    joined_ways,
)
from onboard.codegen.translate.language.statements.assignments.own_objects import holds_objects
from onboard.codegen.translate.language.trees.syntax import (
    Untranslatable,
    attribute,
    call,
    name,
    with_place,
)
from onboard.codegen.translate.language.values import NONE, Code, Items, Known, Unread, Value


class Filled(Exception):
    """A loop appends to a list: it has to exist at run time."""

    def __init__(self, variable: str, item: Value) -> None:
        super().__init__(variable)
        self.variable = variable
        self.item = item


def comprehended(node: ast.For, frame: Frame) -> tuple[ast.expr, Value] | None:
    """Return the list and its value when a loop does nothing but append to an empty one, or to one of
    modules, or put new modules in the places of all that it has.
    """
    match node.body:
        case [
            ast.Assign(targets=[ast.Subscript(value=owner, slice=ast.Name(id=index))], value=item)
        ]:
            return _all_replaced(node, owner, index, item, frame)
        case [
            *before,
            ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id=variable), attr="append"), args=[item]
                )
            ),
        ]:
            known = frame.env.values.get(variable)
            parts = parts_of(known) if isinstance(known, Items) and known.items else ()
            if not isinstance(known, Items) or parts is None:
                return None
            if not all(map(_is_local, before)) or _carries(before):
                return None
            loop = ast.comprehension(node.target, node.iter, [], 0)
            made = ast.copy_location(ast.ListComp(item, [loop]), node)
            value = comprehension(
                made, frame, [part for part in before if isinstance(part, ast.Assign)]
            )
            more = parts_of(value) if parts else ()
            if more is None:
                return None
            return name(variable, store=True), joined((*parts, *more)) if parts else value
    return None


def _all_replaced(
    node: ast.For, owner: ast.expr, index: str, item: ast.expr, frame: Frame
) -> tuple[ast.expr, Value] | None:
    """Return the list of modules of `for i in range(len(owner)): owner[i] = item`, whose new ones
    know nothing of the old ones, which nothing else reads; None for other loops.
    """
    place = ast.unparse(owner)
    over = (ast.unparse(node.target), ast.unparse(node.iter))
    every = over == (index, f"range(len({place}))") and frame.kind == "init"
    if not every or place in ast.unparse(item) or (turns := _turns(frame.evaluate(owner))) is None:
        return None
    loop = ast.comprehension(node.target, turns, [], 0)
    made = comprehension(ast.copy_location(ast.ListComp(item, [loop]), node), frame)
    if not isinstance(made, ModuleList):
        return None
    target = ast.parse(f"{place} = 0").body[0]
    assert isinstance(target, ast.Assign)
    listed = call(attribute(name("nn"), "ModuleList"), made.expr)
    return target.targets[0], replace(made, expr=listed)


def _turns(modules: Value) -> ast.expr | None:
    """Return `range(n)` with which a constructor makes a list of modules that nothing reads; None for
    other lists.
    """
    match modules:
        case ModuleList(
            expr=ast.Call(
                args=[
                    ast.ListComp(generators=[ast.comprehension(iter=ast.Call() as turns, ifs=[])])
                ]
            )
        ) if ast.unparse(turns.func) == "range" and len(turns.args) == 1:
            return turns
    return None


def without_repeated(node: ast.For, frame: Frame) -> ast.For:
    """Return a loop over `zip(modules, [None] * length)` as one over the modules, and one over
    `enumerate([same for _ in range(n)])` as one over the numbers; the variable of what is always the
    same is bound to it.
    """
    match node.iter, node.target:
        case ast.Call(func=ast.Name(id="enumerate"), args=[ast.Name() as inner]), ast.Tuple(
            elts=[ast.Name(id=number) as counted, ast.Name() as target]
        ) if (turns := _turns_of(frame.evaluate(inner))) is not None:
            same = ast.Assign([target], ast.Subscript(inner, name(number), ast.Load()))
            body = [ast.copy_location(same, node), *node.body]
            return ast.copy_location(ast.For(counted, turns, body, node.orelse), node)
        case ast.Call(func=ast.Name(id="enumerate") as function, args=[inner, *rest]), ast.Tuple(
            elts=[number, target]
        ):
            inside = ast.For(target, inner, node.body, node.orelse)
            new = without_repeated(ast.copy_location(inside, node), frame)
            if new is inside:
                return node
            over: ast.expr = ast.Call(function, [new.iter, *rest], [])
            target = ast.Tuple([number, new.target], ast.Store())
        case ast.Call(func=ast.Name(id="zip"), args=parts, keywords=[]), ast.Tuple(
            elts=targets
        ) if len(parts) == len(targets):
            values = [frame.settle(frame.evaluate(part)) for part in parts]
            left = [i for i, value in enumerate(values) if not isinstance(value, Repeated)]
            if len(left) != 1:
                return node
            for name_of, value in zip(targets, values, strict=True):
                if isinstance(value, Repeated) and isinstance(name_of, ast.Name):
                    frame.env.values[name_of.id] = value.item
            over, target = parts[left[0]], targets[left[0]]
        case _:
            return node
    return ast.copy_location(ast.For(target, over, node.body, node.orelse), node)


def _turns_of(value: Value) -> ast.expr | None:
    """Return what counts the items of a list whose items are all one dict of the config's."""
    match value:
        case Repeated(
            item=Setting(),
            expr=ast.ListComp(generators=[ast.comprehension(target=ast.Name(id="_"), iter=turns)]),
        ) if ast.unparse(turns).startswith("range("):
            return turns
    return None


def known_items(node: ast.expr, frame: Frame) -> Sequence[Value] | None:
    """Return what the rounds of a loop are over, where that is a known list in which modules are, or
    objects of plain classes; None for others.
    """
    match node:
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner], keywords=[]):
            items = known_items(inner, frame)
            numbered = enumerate(items or ())
            pairs = [Items((Known(index), item)) for index, item in numbered]
            return None if items is None else pairs
        case ast.Name() | ast.Tuple() | ast.List():
            value = frame.evaluate(node)
            items = value.items if isinstance(value, Items) else ()
            known = any(isinstance(item, Instance | ByName) for item in items)
            return items if known else None
        case ast.Attribute(value=ast.Name(id="self"), attr=attr) if frame.cls is not None:
            kept = frame.env.values.get(f"self.{attr}", frame.cls.attributes.get(attr, NONE))
            return kept.items if isinstance(kept, Items) and holds_objects(kept) else None
    return None


def _is_local(statement: ast.stmt) -> bool:
    """Whether a statement assigns a variable, or an item of one under a known key."""
    match statement:
        case ast.Assign(
            targets=[ast.Name() | ast.Subscript(value=ast.Name(), slice=ast.Constant(value=str()))]
        ):
            return True
    return False


def _carries(statements: Sequence[ast.stmt]) -> bool:
    """Whether assignments to variables read what the loop's step before has left in one of them."""
    stored: set[str] = set()
    early: set[str] = set()
    for statement in statements:
        assert isinstance(statement, ast.Assign)
        read = {item.id for item in ast.walk(statement.value) if isinstance(item, ast.Name)}
        read |= {
            target.value.id
            for target in statement.targets
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
        }
        early |= read - stored
        stored |= {item.id for item in statement.targets if isinstance(item, ast.Name)}
    return bool(early & stored)


def append(node: ast.expr, frame: Frame) -> bool:
    """Execute `places.append(item)` of a list that is known; return whether it was one."""
    match node:
        case ast.Call(func=ast.Attribute(value=target, attr="append"), args=[item], keywords=[]):
            place = ast.unparse(target)
        case _:
            return False
    known = frame.env.values.get(place)
    if isinstance(known, Unread):
        return True
    if not isinstance(known, Items | ModuleList | ModuleRows | Objects):
        return False
    try:
        value = frame.settle(frame.evaluate(item))
        if isinstance(value, Unread):
            value.code()  # which raises what is in the way of it
    except Untranslatable as error:
        if not isinstance(known, Items) or not _may_stay_unread(target, error, frame):
            raise
        frame.env.values[place] = Unread(with_place(error, str(error)))
        return True
    if isinstance(known, Objects):
        code = known.tuple_of(value)
        frame.emit(ast.Expr(call(attribute(known.expr, "append"), code)), node)
        return True
    if isinstance(known, Items):
        if frame.loops:
            raise Filled(place, value)
        value = named(entry_name(target, len(known.items)), value, frame, node)
        frame.env.values[place] = Items((*known.items, value), kind=LIST)
        return True
    if isinstance(value, ModuleList | ModuleTable) and is_row(value):
        frame.emit(ast.Expr(call(attribute(known.expr, "append"), value.code())), node)
        frame.env.values[place] = with_row(known, value)
        return True
    if not isinstance(value, Instance) or not isinstance(known, ModuleList):
        return False
    if known.stretches and not frame.loops:
        frame.env.values[place] = joined((*known.stretches, value))
        return True
    frame.emit(ast.Expr(call(attribute(known.expr, "append"), value.code())), node)
    frame.env.values[place] = ModuleList(joined_ways(known.made, value.made), known.expr)
    return True


def _may_stay_unread(target: ast.expr, error: Untranslatable, frame: Frame) -> bool:
    """Whether a forward of repositories' code may go on without a translation of what it adds to a
    list of its own: nothing may read that then.
    """
    if not (frame.translator.specialised and frame.kind == "forward"):
        return False
    return isinstance(target, ast.Name) and type(error) is Untranslatable


def is_from(filled: Filled, outside: Env, start: Env) -> bool:
    """Whether a list that a loop fills is one from before the loop around it, too."""
    return outside.values.get(filled.variable) is start.values[filled.variable]


def exist(filled: Filled, frame: Frame, origin: ast.AST) -> None:
    """Have a list that a loop fills exist before the loop."""
    known = frame.env.values[filled.variable]
    if not isinstance(known, Items):
        raise Untranslatable(f"the list {filled.variable}, which a loop fills and which is another")
    place = name(filled.variable)
    if isinstance(filled.item, ByName):
        objects = [item for item in known.items if isinstance(item, ByName)]
        shape, (*codes, _) = tuple_of([*objects, filled.item])
        frame.emit(ast.Assign([name(filled.variable, store=True)], ast.List(codes)), origin)
        frame.env.values[filled.variable] = Objects(place, form=LIST, shape=shape)
        return
    frame.emit(ast.Assign([name(filled.variable, store=True)], listed(known)), origin)
    made = tuple(way for item in known.items if isinstance(item, Instance) for way in item.made)
    modules = isinstance(filled.item, Instance | ModuleList | ModuleTable)
    frame.env.values[filled.variable] = (
        ModuleList(made, place) if modules else Code(place, form=LIST)
    )


def listed(known: Items) -> ast.List:
    """Return the code of a known list that is one at run time, too."""
    return ast.List([each.code() for each in known.items], ast.Load())


def grown(start: Env, end: Env) -> dict[str, Value]:
    """Return the lists of modules to which a loop's body appended modules made in other ways, and
    those that nothing may read since it appended something else.
    """
    return {
        key: value
        for key, value in end.values.items()
        if _is_unread_now(start.values.get(key), value)
        or isinstance(value, ModuleList | ModuleRows)
        and isinstance(old := start.values.get(key), ModuleList | ModuleRows)
        and len(joined_ways(old.made, value.made)) > len(old.made)
    }


def _is_unread_now(before: Value | None, after: Value) -> bool:
    was_known = isinstance(before, Items) or (before is not None and before.equals(NONE))
    return was_known and isinstance(after, Unread)
