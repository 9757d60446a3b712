"""`try` statements of repositories' code: whether the body fails is seen where a small model runs.

What a constructor tries is a matter of the config, or of what is installed, and so comes out the
same for all models of this config.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from onboard.analysis.behaviour.lines_run import lines_run
from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.trees.syntax import Untranslatable, call, name


class Tried(Mechanism):
    """`try: ... except ...: ...`."""

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """What is tried, where it never fails; what is done else, where it always does."""
        node, *rest = statements
        if not isinstance(node, ast.Try) or not frame.translator.specialised:
            return None
        failed = [item for item in node.handlers if _runs(item.body[0], frame)]
        if not failed:
            if not _runs(node.body[0], frame):
                raise Untranslatable("a try that no small model comes to")
            return [*node.body, *node.orelse, *node.finalbody, *rest]
        if len(failed) > 1 or _runs(failed[0].body[0], frame) != _runs(node, frame):
            raise Untranslatable("a try that fails now and then")
        done, fails = _up_to_failure(node, frame)
        _guard_absent(fails, frame)
        return [*done, *failed[0].body, *node.finalbody, *rest]


def _up_to_failure(node: ast.Try, frame: Frame) -> tuple[list[ast.stmt], ast.AST]:
    """Return what is done before a body fails, which it always does, and what fails: the last
    statement that begins, or its condition.
    """
    begun = [item for item in node.body if _runs(item, frame)]
    last = begun[-1]
    inside = [item for item in ast.walk(last) if isinstance(item, ast.stmt) and item is not last]
    if begun != node.body[: len(begun)] or _runs(last, frame) < _runs(node, frame):
        raise Untranslatable("a try that fails now and then")
    if any(_runs(item, frame) for item in inside):
        raise Untranslatable("a try that fails inside one of its statements")
    return begun[:-1], last.test if isinstance(last, ast.If) else last


def _runs(node: ast.stmt, frame: Frame) -> int:
    program = frame.translator
    return lines_run(program.model, program.config)[str(frame.source.path), node.lineno]


def _guard_absent(tried: ast.AST, frame: Frame) -> None:
    """Take for granted that the config has no field that the statement asks for in vain."""
    for node in ast.walk(tried):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            is_config = ast.unparse(node.value) in ("config", "self.config")
            owner = frame.evaluate(node.value) if is_config else None
            if isinstance(owner, Config) and not hasattr(owner.obj, node.attr):
                asked = call(name("hasattr"), owner.code(), ast.Constant(node.attr))
                frame.translator.guard(ast.UnaryOp(ast.Not(), asked), frame)
