"""What a reader of generated code does not want to see: copies, aliases, types that are not so."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.cleanup import clean
from onboard.codegen.translate.output.argument_types import of_module

Translate = Callable[..., tuple[ClassState, str, str]]


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a = x\nb = a + a\nreturn b", "return x + x"),
        ("a = self.table\nreturn a[y]", "return self.table[y]"),
        ("a = x\nb = a + y\nreturn b + a", None),  # read again
        ("a = self.table\nreturn a + a", None),
        ("a = f(x)\nreturn a + y", None),
        ("a, c = f(x)\nb = a\nreturn b + b + c", "b, c = f(x)\nreturn b + b + c"),
        ("a, c = f(x)\nb = a\nb += a\nreturn a + b + c", None),  # read again
        ("a = x\nb[a] = a + y\nreturn b", None),  # the place that is written is read, too
        ("a = x\nb = [a + a for x in y]\nreturn b", "a = x\nreturn [a + a for x in y]"),
    ],
)
def test_aliases_go_where_that_changes_nothing(text: str, cleaned: str | None) -> None:
    found = clean(ast.parse(text).body)
    assert "\n".join(map(ast.unparse, found)) == (cleaned or text)


def test_a_shape_from_before_a_loop_is_taken_before_it(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(config.layers)])

    def forward(self, x):
        shape = (-1, x.shape[1], x.size(-1))
        for layer in self.layers:
            x = layer(x)
        return x.view(shape)
""",
        {"layers": 2},
    )
    assert forward.split("\n") == [
        "shape = (-1, x.shape[1], x.size(-1))",
        "for layer in self.layers:",
        "    x = layer(x)",
        "return x.view(shape)",
    ]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("self.local = kind == 'local'", "str"),
        ("self.scale = kind['scale']", "dict[str, Any]"),
        ("self.proj = nn.Linear(kind, kind)", "int"),
    ],
)
def test_an_argument_without_annotation_has_the_type_of_its_use(body: str, found: str) -> None:
    (function,) = ast.parse(f"def __init__(self, kind): {body}").body
    assert isinstance(function, ast.FunctionDef)
    assert of_module(function, "kind") == found
