"""Scores that are masked in place through a slice of them, which is all of them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from onboard.codegen.translate.language.frame import Frame, Mechanism
from onboard.codegen.translate.language.values import Code
from onboard.codegen.translate.mechanisms.attention.scores import Scores
from onboard.codegen.translate.mechanisms.attention.sdpa import unpacked_sizes


class FilledSlices(Mechanism):
    """`scores[:, :, -length:, -length:].masked_fill_(mask, least)`: without a cache of the code's own
    there are as many queries and keys as tokens.
    """

    def instead(self, statements: Sequence[ast.stmt], frame: Frame) -> Sequence[ast.stmt] | None:
        """`scores.masked_fill_(mask, least)`."""
        match statements[0]:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(
                        value=ast.Subscript(
                            value=ast.Name(id=variable) as scores,
                            slice=ast.Tuple(elts=[*_, rows, columns] as axes),
                        ),
                        attr="masked_fill_",
                    ),
                    args=args,
                    keywords=keywords,
                )
            ) if frame.translator.specialised and isinstance(
                frame.env.values.get(variable), Scores
            ):
                lengths = {ast.unparse(rows), ast.unparse(columns)}
                if len(lengths) > 1 or not all(_is_whole(axis, frame) for axis in axes):
                    return None
                filled = ast.Call(ast.Attribute(scores, "masked_fill_"), args, keywords)
                plain = ast.copy_location(ast.Expr(filled), statements[0])
                return [ast.fix_missing_locations(plain), *statements[1:]]
        return None


def _is_whole(axis: ast.expr, frame: Frame) -> bool:
    """Whether a slice leaves nothing out: `:`, or `-length:` or `:length` of a text's length."""
    match axis:
        case ast.Slice(lower=None, upper=None, step=None):
            return True
        case (
            ast.Slice(
                lower=ast.UnaryOp(op=ast.USub(), operand=ast.Name() as size), upper=None, step=None
            )
            | ast.Slice(lower=None, upper=ast.Name() as size, step=None)
        ):
            length = frame.evaluate(size)
            return (
                isinstance(length, Code)
                and not length.static
                and ast.unparse(length.expr) in unpacked_sizes(frame)
            )
    return False
