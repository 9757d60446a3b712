"""Loops: run turn by turn where all that they do is known, or written as loops."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from onboard.codegen.translate.language.env import Env, Turn
from onboard.codegen.translate.language.expressions.branch_types import numbered
from onboard.codegen.translate.language.expressions.comprehensions import bind_target, iteration
from onboard.codegen.translate.language.expressions.evaluate import condition
from onboard.codegen.translate.language.frame import Frame
from onboard.codegen.translate.language.handed.gathered import known_items
from onboard.codegen.translate.language.object_values import Global, ModuleList
from onboard.codegen.translate.language.statements import lists
from onboard.codegen.translate.language.statements.assignments.assign import Widened, store
from onboard.codegen.translate.language.statements.assignments.own_entries import OwnEntries
from onboard.codegen.translate.language.statements.loops import loop_changes, turns
from onboard.codegen.translate.language.statements.loops.searches import looked_for
from onboard.codegen.translate.language.statements.loops.turns import BREAKS, GOES_ON, RETURNS
from onboard.codegen.translate.language.trees.skips import leaves, without_continue
from onboard.codegen.translate.language.trees.syntax import Untranslatable, stored_names
from onboard.codegen.translate.language.values import NONE, Items, Known, Mask, Value

Execute = Callable[[Sequence[ast.stmt], Frame], str]
_Loop = ast.For | ast.While
_Run = tuple[list[ast.stmt], Env, str]
_MOST = 64
"""Turns that are run one by one."""


def execute_for(node: ast.For, frame: Frame, execute: Execute) -> str | None:
    """Execute `for`; return how it ends where that is not at its end."""
    node = lists.without_repeated(node, frame)
    if frame.mechanisms.loop(node, frame):
        return None
    if (items := lists.known_items(node.iter, frame)) is not None:
        return _take(_run(node, _of_items(node, items, frame), frame, execute), frame)
    if (made := lists.comprehended(node, frame)) is not None:
        store(*made, frame, node)
        return None
    if not any(map(leaves, node.body)) and not _is_of_file(node.iter, frame):
        return _written(node, frame, execute)
    return _run_or_written(node, _of_constants(node, frame), frame, execute)


def execute_while(node: ast.While, frame: Frame, execute: Execute) -> str | None:
    """Execute `while`; return how it ends where that is not at its end."""
    return _run_or_written(node, _of_tests(node, frame), frame, execute)


def _run_or_written(
    node: _Loop, begun: Iterator[None], frame: Frame, execute: Execute
) -> str | None:
    """Run a loop turn by turn where that leaves no code, or where it cannot be written as one."""
    before, guards = frame.env.copy(), loop_changes.taken_for_granted(frame)
    returned, emitted = len(frame.returns), len(frame.out)
    run: _Run | None = None
    try:
        run = _run(node, begun, frame, execute)
    except Untranslatable:
        del frame.returns[returned:]
    if run is not None and not run[0]:
        return _take(run, frame)
    given_back = frame.returns[returned:]
    del frame.returns[returned:]
    try:
        return _written(node, frame, execute)
    except Untranslatable:
        frame.env = before
        del frame.out[emitted:], frame.returns[returned:]
        if run is None:
            loop_changes.forget(guards, frame)
            if looked_for(node, frame):
                return None
            raise
    frame.returns += given_back
    return _take(run, frame)


def _run(node: _Loop, begun: Iterator[None], frame: Frame, execute: Execute) -> _Run:
    """Run a loop turn by turn; return the code that this leaves, the variables and how it ends.

    Args:
        node: the loop.
        begun: begins the turns, one after the other.

    Raises:
        Untranslatable: it is not known whether a turn is the last one.
    """
    statements = without_continue(node.body)
    with frame.branch(frame.env.copy()) as body, turns.turn(node, None, frame):
        frame.branches -= 1  # which is entered once, whatever is not known
        try:
            for _ in begun:
                ending = execute(statements, frame)
                if ending in (BREAKS, RETURNS):
                    return body, frame.env, GOES_ON if ending == BREAKS else RETURNS
            return body, frame.env, execute(node.orelse, frame)
        finally:
            frame.branches += 1


def _take(run: _Run, frame: Frame) -> str | None:
    body, frame.env, ending = run
    frame.out.extend(body)
    return None if ending == GOES_ON else ending


def _of_items(node: ast.For, items: Sequence[Value], frame: Frame) -> Iterator[None]:
    for item in items:
        store(node.target, item, frame, node)
        yield


def _of_constants(node: ast.For, frame: Frame) -> Iterator[None]:
    """Begin the turns of a loop over constants.

    Raises:
        Untranslatable: it is over something else, or long.
    """
    items = _constants(node.iter, frame)
    if items is None or len(items) > _MOST:
        raise Untranslatable(f"a loop at {frame.source.location(node)} over what is not known")
    yield from _of_items(node, items, frame)


def _is_of_file(node: ast.expr, frame: Frame) -> bool:
    """Whether a loop is over a list of constants that the file has."""
    value = frame.evaluate(node) if isinstance(node, ast.Name) else None
    return isinstance(value, Global) and known_items(value) is not None


def _constants(node: ast.expr, frame: Frame) -> Sequence[Value] | None:
    """Return the constants that a loop is over; None for others."""
    match node:
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner], keywords=[]):
            numbered = enumerate(_constants(inner, frame) or ())
            return [Items((Known(index), item)) for index, item in numbered] or None
        case ast.Call(func=ast.Name(id="range"), args=bounds, keywords=[]):
            known = [frame.evaluate(bound) for bound in bounds]
            if all(isinstance(each, Known) and type(each.value) is int for each in known):
                return [*map(Known, range(*(each.value for each in known)))]  # type: ignore[attr-defined]
            return None
    items = known_items(frame.evaluate(node))
    return items if items is not None and all(map(_is_constant, items)) else None


def _is_constant(item: Value) -> bool:
    """Whether a value is a constant, or a tuple of such."""
    return isinstance(item, Known) or isinstance(item, Items) and all(map(_is_constant, item.items))


def _of_tests(node: ast.While, frame: Frame) -> Iterator[None]:
    """Begin the turns of a loop whose test is known each time.

    Raises:
        Untranslatable: it is not, or goes on for long.
    """
    for _ in range(_MOST):
        if (goes_on := frame.evaluate(node.test).truth()) is None:
            break
        if not goes_on:
            return
        yield
    raise Untranslatable(f"While at {frame.source.location(node)}, whose turns are not known")


def _written(node: _Loop, frame: Frame, execute: Execute) -> str | None:
    """Write a loop, executing its body until what is known at its start holds at its end, too."""
    statements = without_continue(node.body)
    over = iteration(node.iter, frame) if isinstance(node, ast.For) else None
    for variable in sorted(stored_names(statements) & frame.env.values.keys()):
        frame.protect(variable, node)
    known_before = loop_changes.taken_for_granted(frame)
    for _ in range(20):
        start = frame.env
        kinds = numbered(node, frame) if isinstance(node, ast.For) else nullcontext()
        try:
            with frame.branch(start.copy()) as body, turns.turn(node, start, frame) as turn, kinds:
                head = _begun(node, over, frame)
                ending = execute(statements, frame)
                if ending == RETURNS:
                    raise Untranslatable(f"a return in a loop at {frame.source.location(node)}")
                if ending not in turns.AWAY:
                    turns.note_end(turn, frame)
                known = _known_at(turn)
                left = _left(turn, frame)
        except lists.Filled as appended:
            if frame.loops and lists.is_from(appended, frame.loops[-1], start):
                raise
            lists.exist(appended, frame, node)
            loop_changes.forget(known_before, frame)
            continue
        except Widened as widened:
            loop_changes.forget(known_before, frame)
            loop_changes.widen(widened.variable, NONE, frame, node)
            continue
        if not known and not any(changed for changed, _ in turn.ends):
            return _emit(head, body, left, turn, frame, execute)
        loop_changes.forget(known_before, frame)
        frame.env.values.update(known)
        for changed, env in turn.ends if not known else ():
            for key in changed:
                loop_changes.widen(key, env.values[key], frame, node)
    raise Untranslatable(f"a loop without a fixed point at {frame.source.location(node)}")


def _begun(
    node: _Loop, over: tuple[ast.expr, Value | None] | None, frame: Frame
) -> ast.For | ast.While:
    """Begin a turn, and return the loop without its body."""
    if isinstance(node, ast.For):
        assert over is not None
        bind_target(node.target, over[1], frame.env)
        return ast.For(_plain_target(node.target), over[0], [], [])
    test = condition(frame.evaluate(node.test))
    if not (test.is_static or frame.kind == "init" or _counts(node.test, frame)) or frame.out:
        raise Untranslatable(
            f"While at {frame.source.location(node)}, as long as values of the text say"
        )
    return ast.While(test.code(), [], [])


def _counts(test: ast.expr, frame: Frame) -> bool:
    """Whether a test compares numbers that no text changes, how many modules are in a list, say."""
    match test:
        case ast.Compare(left=left, comparators=others):
            return all(_counts(side, frame) for side in (left, *others))
        case ast.Call(func=ast.Name(id="len"), args=[listed]):
            return isinstance(frame.evaluate(listed), ModuleList)
    return frame.evaluate(test).is_static


def _known_at(turn: Turn) -> dict[str, Value]:
    """Return what a loop has left of variables that are known in all turns: masks of layers, lists of
    modules.
    """
    assert turn.start is not None
    known: dict[str, Value] = {}
    for changed, env in turn.ends:
        held = {key: env.values[key] for key in changed}
        known |= {k: v for k, v in held.items() if isinstance(v, Mask | OwnEntries)}
        known |= lists.grown(turn.start, env)
    return known


def _left(turn: Turn, frame: Frame) -> dict[str, Value]:
    """Return the variables that the last turn leaves, wherever it ends."""
    assert turn.start is not None
    found = [loop_changes.left(turn.node, turn.start, env, frame) for _, env in turn.ends]
    return {
        key: value
        for key, value in (found[0] if found else {}).items()
        if all(key in each and value.equals(each[key]) for each in found)
    }


def _emit(
    head: ast.For | ast.While,
    body: list[ast.stmt],
    left: dict[str, Value],
    turn: Turn,
    frame: Frame,
    execute: Execute,
) -> str | None:
    """Emit a loop that is as it was at its start, and what it has besides."""
    node, start = turn.node, turn.start
    assert start is not None
    if body:
        head.body = body
        frame.emit(head, node)
        frame.env.values.update(left)
    for _, env in turn.ends:
        frame.env.values.update(loop_changes.filled_dicts(start, env))
    if not node.orelse:
        return None
    if any(isinstance(each, ast.Break) for item in body for each in ast.walk(item)):
        raise Untranslatable(f"the else of a loop at {frame.source.location(node)}")
    ending = execute(node.orelse, frame)
    return None if ending == GOES_ON else ending


def _plain_target(target: ast.expr) -> ast.expr:
    node = ast.parse(f"for {ast.unparse(target)} in x: pass").body[0]
    assert isinstance(node, ast.For)
    return node.target
