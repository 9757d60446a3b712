"""A model file without what it says of several ranks."""

from __future__ import annotations

import ast
import re

from onboard.codegen.format import format_python
from onboard.codegen.hints.spans import LAYERS, MEANING, OPS, UNSAID, Spans, is_constant
from onboard.ops.library import op_sources

LINEAR = "torch.nn.functional.linear"
_HINTS = {"layer_type", "enable_sharding"}
_UNSAID = re.compile(rf"\n\n{UNSAID}.*(?=\n\"\"\"\n)")
_SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def without_hints(text: str) -> str:
    """Return a model file's text that says nothing of ranks, and computes the same; one that says
    nothing of them as it is.
    """
    text = _UNSAID.sub("", text, count=1)
    removing, tree = _Removing(text), ast.parse(text)
    removing.constants(tree)
    for node in [each for each in ast.walk(tree) if isinstance(each, ast.Call)]:
        called = ast.unparse(node.func)
        if called in LAYERS.values():
            removing.layer(node)
        elif called.startswith(OPS):
            removing.visit(node, called.removeprefix(OPS))
    return format_python(removing.done()) if removing.edits else text


class _Removing(Spans):
    """A text on its way to having no hints."""

    def constants(self, tree: ast.Module) -> None:
        """Take away the hints of ops that have a name."""
        for node in tree.body:
            if is_constant(node):
                self.replace(self.line(node.lineno), self.line(node.lineno + 1), "")
        if (place := self.text.find(MEANING)) >= 0:
            start = len(self.text[:place].encode())
            self.replace(start, start + len(MEANING), "")

    def layer(self, node: ast.Call) -> None:
        """`colwise(self.proj, x, ...)` becomes `self.proj(x)`."""
        layer, first = node.args
        self.replace(self.start(node), self.start(first), f"{ast.unparse(layer)}(")
        self.replace(self.end(first), self.end(node), ")")

    def visit(self, node: ast.Call, op: str) -> None:
        """Take the hints off a call of an op."""
        if op == "torch_linear_simple":
            self.replace(self.start(node), self.start(node.args[0]), f"{LINEAR}(")
            self.replace(self.end(node.args[-1]), self.end(node), ")")
        elif op == "view":
            self._method(node, "reshape", 2)
        elif op == "split_with_sizes":
            self._method(node, "split", 3)
        elif op == "all_reduce":
            self.replace(self.start(node), self.start(node.args[0]), "")
            self.replace(self.end(node.args[0]), self.end(node), "")
        elif op in op_sources() and op_sources()[op].hinted:
            self._op(node)

    def _method(self, node: ast.Call, name: str, most: int) -> None:
        first, given = node.args[0], [self.code(each) for each in node.args[1:most]]
        given += [f"dim={self.code(each.value)}" for each in node.keywords if each.arg == "dim"]
        opens, closes = ("", "") if isinstance(first, _SIMPLE) else ("(", ")")
        self.replace(self.start(node), self.start(first), opens)
        end = f"{closes}.{name}({', '.join(given)})"
        self.replace(self.end(first), self.end(node), end)

    def _op(self, node: ast.Call) -> None:
        kept = [each for each in node.keywords if each.arg not in {None, *_HINTS}]
        if len(kept) < len(node.keywords):
            last = [*node.args, *(each.value for each in kept)][-1]
            self.replace(self.end(last), self.end(node), ")")
