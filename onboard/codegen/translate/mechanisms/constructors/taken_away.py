"""Parameters that a constructor takes away again from all modules that it has made, biases say."""

from __future__ import annotations

import ast
from typing import Literal

from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.trees.syntax import call, name

FUNCTION = "leave_out"
_ASKED = (
    "hasattr({0}, '{1}') and isinstance({0}.{1}, nn.Parameter)",
    "isinstance({0}.{1}, nn.Parameter)",
    "isinstance(getattr({0}, '{1}', None), nn.Parameter)",
    "getattr({0}, '{1}', None) is not None",
)


class LeftOut(Mechanism):
    """`for module in self.modules(): if isinstance(module.bias, nn.Parameter): ...`."""

    def loop(self, node: ast.For, frame: Frame) -> Literal[True] | None:
        """A call that does this."""
        if frame.kind != "init" or not frame.translator.specialised:
            return None
        if (left := _left_out(node)) is None:
            return None
        frame.emit(ast.Expr(call(name(FUNCTION), name("self"), ast.Constant(left))), node)
        return True


def _left_out(node: ast.For) -> str | None:
    """Return the name of the parameters that such a loop takes away."""
    match node:
        case ast.For(
            target=ast.Name(id=module),
            iter=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr="modules"), args=[]),
            body=[ast.If(test=test, body=[*notes, ast.Expr(value=ast.Call() as taken)], orelse=[])],
        ) if all(map(_is_logged, notes)):
            match taken:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=owner), attr="register_parameter"),
                    args=[ast.Constant(value=str() as left), ast.Constant(value=None)],
                ) if owner == module:
                    asked = {each.format(module, left) for each in _ASKED}
                    text = ast.unparse(test).replace("torch.nn.", "nn.")
                    return left if text in asked else None
    return None


def _is_logged(statement: ast.stmt) -> bool:
    """Whether a statement only tells a reader something: `logger.info(...)`, `warnings.warn(...)`,
    `print(...)`, also under a condition that calls nothing.
    """
    match statement:
        case ast.If(test=test, body=notes, orelse=[]):
            calls = any(isinstance(node, ast.Call) for node in ast.walk(test))
            return not calls and all(map(_is_logged, notes))
        case ast.Expr(value=ast.Call(func=ast.Name(id="print"))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=logger), attr=attr))):
            return logger.lower().startswith("log") or (logger, attr) == ("warnings", "warn")
    return False
