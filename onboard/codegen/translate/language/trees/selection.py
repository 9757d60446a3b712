"""A choice of the best that is made only where there are more: `if x.shape[-1] > k: ... topk(x, k)
...`.

An exported graph holds one side of such a branch. The best `min(k, all)` of a short text are all of
it, so that the branch may be taken always: it does for long texts what it did, and for short ones
it leaves nothing out.
"""

from __future__ import annotations

import ast
import copy

_TOP = {"topk"}


def always(node: ast.If) -> list[ast.stmt] | None:
    """Return the body of such a branch with a choice that exists for any length; None for another
    branch.
    """
    match node:
        case ast.If(
            test=ast.Compare(
                left=ast.Subscript() as size, ops=[ast.Gt() | ast.GtE()], comparators=[most]
            ),
            orelse=[],
        ) if (chosen_from := _last_size(size)) is not None:
            body = copy.deepcopy(node.body)
            tops = [
                top
                for statement in body
                for top in ast.walk(statement)
                if _chooses(top, chosen_from, most)
            ]
            for top in tops:
                assert isinstance(top, ast.Call)
                _limit(top, most, size)
            return body if len(tops) == 1 else None
    return None


def _last_size(node: ast.Subscript) -> str | None:
    """Return the source of x in `x.shape[-1]`."""
    text = ast.unparse(node)
    return text.removesuffix(".shape[-1]") if text.endswith(".shape[-1]") else None


def _chooses(node: ast.AST, chosen_from: str, most: ast.expr) -> bool:
    """Whether a call is `torch.topk(x, most, ...)` or `x.topk(most, ...)`."""
    if not (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _TOP
    ):
        return False
    written = [ast.unparse(item) for item in node.args]
    owner = ast.unparse(node.func.value)
    return [owner, *written][-2:] == [chosen_from, ast.unparse(most)]


def _limit(top: ast.Call, most: ast.expr, size: ast.expr) -> None:
    fewest = ast.Call(ast.Name("min", ast.Load()), [most, size], [])
    top.args[-1] = ast.copy_location(ast.fix_missing_locations(fewest), top.args[-1])
    ast.fix_missing_locations(top)
