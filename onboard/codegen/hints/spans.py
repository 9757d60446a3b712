"""Edits of the text of expressions that leave the rest of the text as it is."""

from __future__ import annotations

import ast
from typing import TypeGuard

from onboard.codegen.hints.output_blocks import shape_given
from onboard.ops.library import NAMESPACE

OPS = f"torch.ops.{NAMESPACE}."
LAYERS = {"colwise": "colwise", "rowwise": "rowwise", "none": "replicated"}
"""`tp_mode` -> the function of `onboard.modeling` that computes a layer with it."""
_CONSTANT = '{} = {{"layer_type": "{}", "enable_sharding": True}}\n'
MEANING = "# Hints of ops whose work several ranks divide; on one device they mean nothing\n"
UNSAID = "Nothing is said of several ranks: "
"""What a file's docstring says, with the reason, where there are no hints."""
_IMPORT = f"from onboard.modeling import {', '.join(LAYERS.values())}\n"


def _constant(kind: str) -> str:
    return kind.upper()


def _is_definition(node: ast.stmt) -> TypeGuard[ast.ClassDef | ast.FunctionDef]:
    return isinstance(node, ast.ClassDef | ast.FunctionDef)


def is_constant(node: ast.stmt) -> bool:
    """Whether a statement gives hints of ops a name."""
    kinds = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return (
        isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and "layer_type" in kinds
    )


class Spans:
    """A text, and edits of expressions in it; those inside others are independent of theirs."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._text = text.encode()
        self._starts = [0]
        for line in self._text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.edits: list[tuple[int, int, int, str]] = []
        """Start, order of those that start alike, end, new text."""

    def replace(self, start: int, end: int, new: str, order: int = 0) -> None:
        """Put a text in the place of another one."""
        self.edits.append((start, order, end, new))

    def code(self, node: ast.expr) -> str:
        """Return the text of an expression."""
        return self._text[self.start(node) : self.end(node)].decode()

    def start(self, node: ast.expr) -> int:
        """Return where an expression begins."""
        return self._starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr) -> int:
        """Return where an expression ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def line(self, number: int) -> int:
        """Return where a line begins."""
        return self._starts[number - 1]

    def done(self) -> str:
        """Return the text with all edits."""
        parts, place = [], 0
        for start, _, end, new in sorted(self.edits, key=lambda each: each[:3]):
            parts += [self._text[place:start].decode(), new]
            place = max(place, end)
        return "".join([*parts, self._text[place:].decode()])


class Edits(Spans):
    """A text on its way to having hints."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.kinds: set[str] = set()
        """The kinds of layers of which ops are told."""

    def linear(self, node: ast.expr, mode: str, said: str) -> None:
        """`self.proj(x)` becomes `colwise(self.proj, x, ...)`, and `F.linear(x, weight)`
        `torch_linear_simple(x, weight, tp_mode="colwise", ...)`.
        """
        assert isinstance(node, ast.Call)
        opened = f"{LAYERS[mode]}({ast.unparse(node.func)}, "
        if len(node.args) > 1:
            opened, said = f"{OPS}torch_linear_simple(", f'tp_mode="{mode}", {said}'
        self.replace(self.start(node), self.start(node.args[0]), opened)
        self.replace(self.end(node.args[-1]), self.end(node), f", {said})")

    def view(self, node: ast.expr, said: str) -> None:
        """`x.view(a, b)` becomes `view(x, (a, b), ...)`."""
        assert isinstance(node, ast.Call)
        given = ", ".join(map(self.code, node.args))
        is_list = len(node.args) == 1 and not isinstance(node.args[0], ast.Starred | ast.Constant)
        shape = given if is_list else f"({given}{',' * (len(node.args) == 1)})"
        self._method(node, "view", shape, said)

    def leave_out(self, node: ast.expr, dim: int) -> None:
        """`x.view(a, b)` becomes `x.view(a, -1)`."""
        size = shape_given(node)[dim]
        self.replace(self.start(size), self.end(size), "-1")

    def head(self) -> None:
        """Have the file import what layers are called with (what it does not need comes off), and
        define the hints of ops.
        """
        [place] = [
            self.line(node.lineno)
            for node in ast.parse(self.text).body
            if isinstance(node, ast.ImportFrom) and node.module == "onboard.modeling"
        ]
        self.replace(place, place, _IMPORT)
        first = next(filter(_is_definition, ast.parse(self.text).body))
        start = self.line(min([first.lineno, *(each.lineno for each in first.decorator_list)]))
        lines = [_CONSTANT.format(_constant(kind), kind) for kind in sorted(self.kinds)]
        self.replace(start, start, "".join([MEANING, *lines, "\n\n"] if lines else []))

    def split(self, node: ast.expr, kind: str) -> None:
        """`x.split(sizes, dim=d)` becomes `split_with_sizes(x, sizes, dim=d, **MLP)`."""
        said = self._hints_of(kind)
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Attribute)
        given = [*node.args]
        named = [f"{each.arg}={self.code(each.value)}" for each in node.keywords]
        if ast.unparse(node.func.value) == "torch":
            first = given.pop(0)
            self.replace(self.start(node), self.start(first), f"{OPS}split_with_sizes(")
            rest = ", ".join([*map(self.code, given), *named, said])
            self.replace(self.end(first), self.end(node), f", {rest})")
            return
        self._method(node, "split_with_sizes", ", ".join([*map(self.code, given), *named]), said)

    def op(self, node: ast.expr, kind: str) -> None:
        """An op is given the hints as further arguments, `**MLP`."""
        assert isinstance(node, ast.Call)
        last = [*node.args, *(each.value for each in node.keywords)][-1]
        self.replace(self.end(last), self.end(node), f", {self._hints_of(kind)})")

    def sum(self, node: ast.expr, kind: str) -> None:
        """`x` becomes `all_reduce(x, ...)`; it goes around what else is written there."""
        start, end = self.start(node), self.end(node)
        self.replace(start, start, f"{OPS}all_reduce(", order=-1)
        self.replace(end, end, f', layer_type="{kind}")', order=1)

    def _hints_of(self, kind: str) -> str:
        self.kinds.add(kind)
        return f"**{_constant(kind)}"

    def _method(self, node: ast.Call, op: str, given: str, said: str) -> None:
        assert isinstance(node.func, ast.Attribute)
        source = node.func.value
        self.replace(self.start(source), self.start(source), f"{OPS}{op}(")
        self.replace(self.end(source), self.end(node), f", {given}, {said})")
