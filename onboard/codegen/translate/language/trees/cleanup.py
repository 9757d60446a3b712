"""Dead code and needless copies in what is left of a function.

Variables and attributes of `self` are treated alike: `self.x` is the name of a place, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from copy import deepcopy

from onboard.codegen.translate.language.trees import casts
from onboard.codegen.translate.language.trees.syntax import name, stored_names

_ITEMS = "[...]"
"""What marks a variable whose items are read by others, whatever becomes of the variable."""


_AROUND = "around "
"""What marks a place that is live where a turn of the loop ends."""


def clean(body: Sequence[ast.stmt], live_out: frozenset[str] = frozenset()) -> list[ast.stmt]:
    """Return the statements without dead assignments and copies; `live_out` is read after them."""
    statements = list(body)
    outside = live_out | _of_callers(body)
    for _ in range(100):
        before = _dump(statements)
        statements, _live = _remove_dead(statements, outside)
        statements = casts.without_unseen(_join_copies(statements, live_out), live_out)
        if _dump(statements) == before:
            return statements
    raise AssertionError("cleaning does not end")


def _dump(statements: Sequence[ast.stmt]) -> str:
    return "\n".join(map(ast.dump, statements))


def free_names(body: Sequence[ast.stmt], live_out: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the places that statements read before they write them."""
    live = _remove_dead(list(body), live_out | _of_callers(body))[1]
    return frozenset(place for place in live if not place.endswith(_ITEMS))


def _of_callers(body: Sequence[ast.stmt]) -> frozenset[str]:
    """Return marks of the variables whose items are written, and which are never assigned: callers
    see the items.
    """
    nodes = [node for statement in body for node in ast.walk(statement)]
    written = stored_names(body)
    methods = [node for node in nodes if isinstance(node, ast.Attribute)]
    grown = {id(node.value) for node in methods if _grows(node)}
    owners = [
        node.value
        for node in nodes
        if isinstance(node, ast.Subscript)
        and (isinstance(node.ctx, ast.Store) or id(node) in grown)
    ]
    return frozenset(
        f"{owner.id}{_ITEMS}"
        for owner in owners
        if isinstance(owner, ast.Name) and owner.id not in written
    )


def places_read(node: ast.AST) -> Iterator[str]:
    """Yield the variables and `self` attributes that a tree reads."""
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ):
        if isinstance(node.ctx, ast.Load):
            yield f"self.{node.attr}"
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    bound: set[str] = set()
    if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
        for generator in node.generators:
            bound |= {item.id for item in ast.walk(generator.target) if isinstance(item, ast.Name)}
    for child in ast.iter_child_nodes(node):
        yield from (place for place in places_read(child) if place not in bound)


def places_written(target: ast.expr) -> set[str]:
    """Return the variables and `self` attributes that an assignment target writes; none for a
    subscript.
    """
    match target:
        case ast.Name(id=variable):
            return {variable}
        case ast.Attribute(value=ast.Name(id="self"), attr=attr):
            return {f"self.{attr}"}
        case ast.Tuple(elts=targets):
            return set().union(*map(places_written, targets))
    return set()


def changed(statement: ast.stmt) -> set[str]:
    """Return the places that a statement writes, or writes items of."""
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.expr)]
    targets = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return set().union(*(places_written(each) | _mutated(each) for each in targets))


def _mutated(target: ast.expr) -> set[str]:
    """Return the variable whose item or attribute a target writes, and its mark."""
    match target:
        case ast.Subscript(value=owner) | ast.Attribute(value=owner) if not places_written(target):
            places = set(places_read(owner))
        case _:
            return set()
    return places | {f"{place}{_ITEMS}" for place in places}


def _remove_dead(body: list[ast.stmt], live_out: frozenset[str]) -> tuple[list[ast.stmt], set[str]]:
    """Return the statements whose effect is seen, and the places that are read before they are
    written.
    """
    live = set(live_out)
    kept: list[ast.stmt] = []
    for statement in reversed(body):
        new = _dead_in(statement, live)
        if new is not None:
            kept.append(new)
    return kept[::-1], live


def _dead_in(statement: ast.stmt, live: set[str]) -> ast.stmt | None:
    """Return a statement without its dead parts, None when all of it is dead; update what is live
    before it.
    """
    match statement:
        case ast.Assign(targets=[target], value=value):
            return _dead_assign(statement, target, value, live)
        case ast.If():
            return _dead_if(statement, live)
        case ast.For():
            return _dead_for(statement, live)
        case ast.While():
            return _dead_while(statement, live)
        case ast.Break() | ast.Continue():
            live.update([place.removeprefix(_AROUND) for place in live])
        case ast.Return():
            kept = [each for each in live if each.endswith(_ITEMS) or each.startswith(_AROUND)]
            live.intersection_update(kept)
        case ast.AugAssign(target=target):
            # In place: what it changes may have another name that is read
            live.update(places_written(target))
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr="register_buffer"),
                args=[ast.Constant(value=str() as key), *_],
            )
        ):
            if f"self.{key}" not in live:
                return None
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Subscript(value=ast.Name(id=variable))) as function
            )
        ) if _grows(function):
            if not {variable, f"{variable}{_ITEMS}"} & live:
                return None
    live.update(places_read(statement))
    return statement


def _grows(function: ast.Attribute) -> bool:
    """Whether a method is one that only adds to a list."""
    return function.attr in ("append", "extend")


def _dead_assign(
    node: ast.Assign, target: ast.expr, value: ast.expr, live: set[str]
) -> ast.stmt | None:
    written = places_written(target)
    wanted = written | _mutated(target)
    if not wanted & live:
        return None
    if isinstance(target, ast.Name) and isinstance(value, ast.Name) and target.id == value.id:
        return None
    unread = {item.id for item in ast.walk(target) if isinstance(item, ast.Name)} - live
    if isinstance(target, ast.Tuple) and unread:
        names = [
            ast.Name("_", ast.Store()) if isinstance(i, ast.Name) and i.id in unread else i
            for i in target.elts
        ]
        node = ast.copy_location(ast.Assign([ast.Tuple(names, ast.Store())], value), node)
    live.difference_update(written)
    live.update(places_read(node))
    return node


def _dead_if(node: ast.If, live: set[str]) -> ast.stmt | None:
    body, body_live = _remove_dead(node.body, frozenset(live))
    orelse, else_live = _remove_dead(node.orelse, frozenset(live))
    if not body and not orelse:
        return None
    live.clear()
    live.update(body_live | else_live | set(places_read(node.test)))
    test = node.test if body else negated(node.test)
    new = ast.If(test, body or orelse, orelse if body else [])
    return ast.copy_location(new, node)


def _dead_for(node: ast.For, live: set[str]) -> ast.stmt | None:
    iterated, targets = set(places_read(node.iter)), places_written(node.target)
    items = {f"{place}{_ITEMS}" for place in targets} - live
    # What is done to an item is seen in what has it
    seen = items if live & (iterated | {f"{place}{_ITEMS}" for place in iterated}) else set()
    body, around, read = _dead_turn(node.body, live | seen)
    if not body or (_only_leaves(body) and not targets & live):
        return None
    live.update(around - targets - items)
    live.update(iterated)
    target, iterable = _without_index(node, read)
    return ast.copy_location(ast.For(target, iterable, body, []), node)


def _dead_while(node: ast.While, live: set[str]) -> ast.stmt | None:
    body, around, _ = _dead_turn(node.body, live | set(places_read(node.test)))
    if not any(_is_seen(each, live) for each in body):
        return None
    live.update(around)
    return ast.copy_location(ast.While(node.test, body, []), node)


def _dead_turn(
    statements: list[ast.stmt], around: set[str]
) -> tuple[list[ast.stmt], set[str], set[str]]:
    """Return a loop's body without its dead parts, what is live around a turn, where what is in
    `around` is, and what a turn reads; `break` and `continue` have to leave all of that as it is.
    """
    around = {place for place in around if not place.startswith(_AROUND)}
    while True:
        marks = {f"{_AROUND}{place}" for place in around}
        body, read = _remove_dead(statements, frozenset(around | marks))
        read = {place for place in read if not place.startswith(_AROUND)}
        if read <= around:
            return body, around, read
        around |= read


def _is_seen(statement: ast.stmt, live: set[str]) -> bool:
    """Whether a statement of a loop does more than to change places that are not live behind it."""
    match statement:
        case ast.Break() | ast.Continue():
            return False
        case ast.Assign(targets=[target]):
            return bool((places_written(target) | _mutated(target)) & live)
        case ast.If(body=body, orelse=orelse):
            return any(_is_seen(each, live) for each in (*body, *orelse))
    return True


def _only_leaves(body: list[ast.stmt]) -> bool:
    """Whether all that statements do is to end turns of a loop."""
    return all(
        isinstance(each, ast.Break | ast.Continue)
        or (isinstance(each, ast.If) and _only_leaves([*each.body, *each.orelse]))
        for each in body
    )


def _without_index(node: ast.For, read: set[str]) -> tuple[ast.expr, ast.expr]:
    """Turn `for i, x in enumerate(xs)` into `for x in xs` when i is not read."""
    match node.iter, node.target:
        case ast.Call(func=ast.Name(id="enumerate"), args=[iterable]), ast.Tuple(
            elts=[ast.Name(id=index), item]
        ):
            if index not in read:
                return item, iterable
    return node.target, node.iter


def negated(test: ast.expr) -> ast.expr:
    """Return `not test`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Compare(left=left, ops=[ast.Is()], comparators=right):
            return ast.Compare(left, [ast.IsNot()], right)
        case ast.Compare(left=left, ops=[ast.IsNot()], comparators=right):
            return ast.Compare(left, [ast.Is()], right)
    return ast.UnaryOp(ast.Not(), test)


def _join_copies(body: list[ast.stmt], live_out: frozenset[str]) -> list[ast.stmt]:
    """Turn `a = e; b = a` into `b = e`, `a, c = e; b = a` into `b, c = e`, and `a = e; return a` into
    `return e` where `a` is not read again.
    """
    out: list[ast.stmt] = []
    for index, statement in enumerate(body):
        statement = _join_inside(statement, body[index + 1 :], live_out)
        joined = _joined(out[-1], statement, body[index + 1 :], live_out) if out else None
        if joined is not None:
            out[-1] = joined
        else:
            out.append(statement)
    return out


def _join_inside(statement: ast.stmt, after: list[ast.stmt], live_out: frozenset[str]) -> ast.stmt:
    if isinstance(statement, ast.If):
        live = frozenset(_remove_dead(after, live_out)[1])
        new = ast.If(
            statement.test, _join_copies(statement.body, live), _join_copies(statement.orelse, live)
        )
        return ast.copy_location(new, statement)
    if isinstance(statement, ast.For):
        body = _join_copies(statement.body, _around(statement, after, live_out))
        new_loop = ast.For(statement.target, statement.iter, body, [])
        return ast.copy_location(new_loop, statement)
    if isinstance(statement, ast.While):
        body = _join_copies(statement.body, _around(statement, after, live_out))
        return ast.copy_location(ast.While(statement.test, body, []), statement)
    return statement


def _around(loop: ast.stmt, after: list[ast.stmt], live_out: frozenset[str]) -> frozenset[str]:
    """Return what is live where turns of a loop end, with the marks that say so."""
    live = _remove_dead([loop, *after], live_out)[1]
    around = {place for place in live if not place.startswith(_AROUND)}
    return frozenset(around | {f"{_AROUND}{place}" for place in around})


class _Renamed(ast.NodeTransformer):
    def __init__(self, old: str, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deepcopy(self.new) if node.id == self.old else node


def _moved(
    first: ast.stmt, second: ast.stmt, after: list[ast.stmt], live_out: frozenset[str]
) -> ast.stmt | None:
    """Return `b = e(x)` for `a = x; b = e(a)`, where `x` is a variable, or an attribute that `e`
    reads once.
    """
    match first, second:
        case ast.Assign(targets=[ast.Name(id=variable)], value=place), ast.Assign(
            value=value
        ) | ast.Return(value=value):
            pass
        case _:
            return None
    if value is None or not (
        isinstance(place, ast.Name) or ast.unparse(place) in places_read(place)
    ):
        return None
    if any(isinstance(node, ast.comprehension | ast.Lambda) for node in ast.walk(value)):
        return None
    reads = list(places_read(value)).count(variable)
    if not reads or (reads > 1 and not isinstance(place, ast.Name)):
        return None
    new = _Renamed(variable, place).visit(deepcopy(value))
    if isinstance(second, ast.Return):
        return ast.copy_location(ast.Return(new), second)
    assert isinstance(second, ast.Assign)
    in_targets = {place for target in second.targets for place in places_read(target)}
    gone = variable not in in_targets | _remove_dead(after, live_out)[1]
    return ast.copy_location(ast.Assign(second.targets, new), second) if gone else None


def _joined(
    first: ast.stmt, second: ast.stmt, after: list[ast.stmt], live_out: frozenset[str]
) -> ast.stmt | None:
    if (moved := _moved(first, second, after, live_out)) is not None:
        return moved
    match first:
        case ast.Assign(targets=[ast.Name(id=variable)], value=value):
            pass
        case ast.Assign(targets=[ast.Tuple(elts=targets)]):
            return _unpacked_into(first, targets, second, after, live_out)
        case _:
            return None
    match second:
        case ast.Return(value=ast.Name(id=returned)) if returned == variable:
            return ast.copy_location(ast.Return(value), first)
        case ast.Assign(targets=[ast.Name() as target], value=ast.Name(id=copied)) if (
            copied == variable
        ):
            if variable not in _remove_dead(after, live_out)[1]:
                return ast.copy_location(ast.Assign([target], value), first)
    return None


def _unpacked_into(
    first: ast.Assign,
    targets: list[ast.expr],
    second: ast.stmt,
    after: list[ast.stmt],
    live_out: frozenset[str],
) -> ast.stmt | None:
    """Return `b, c = e` for `a, c = e; b = a` where `a` is not read again."""
    match second:
        case ast.Assign(targets=[ast.Name(id=target) as new], value=ast.Name(id=copied)):
            pass
        case _:
            return None
    names = [item.id for item in targets if isinstance(item, ast.Name)]
    alone = len(names) == len(targets) and names.count(copied) == 1 and target not in names
    if not alone or copied in _remove_dead(after, live_out)[1]:
        return None
    unpacked: list[ast.expr] = [new if each == copied else name(each, store=True) for each in names]
    return ast.copy_location(ast.Assign([ast.Tuple(unpacked, ast.Store())], first.value), first)
