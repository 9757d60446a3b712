"""Calls with hints have lines of their own where that makes a file shorter, and change nothing."""

from __future__ import annotations

import ast

import pytest

from onboard.codegen.format import format_python
from onboard.codegen.hints.named_lines import with_named_lines
from onboard.codegen.hints.same_text import inline_once_read

HEAD = "class Block:\n    def forward(self, x, mask=None):\n"
MLP = 'layer_type="mlp"'
OPENED = f"act(colwise(self.gate_proj, x, {MLP})) * colwise(self.up_proj, x, {MLP})"
GATED = f"rowwise(self.down_proj, {OPENED}, {MLP})"


def _file(*lines: str) -> str:
    return format_python(HEAD + "".join(f"        {line}\n" for line in lines))


def _canonical(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inline_once_read(node)
    return ast.unparse(tree)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            [f"return torch.ops.onboard.all_reduce({GATED}, {MLP})"],
            [
                f"gate = colwise(self.gate_proj, x, {MLP})",
                f"up = colwise(self.up_proj, x, {MLP})",
                f"output = rowwise(self.down_proj, act(gate) * up, {MLP})",
                f"return torch.ops.onboard.all_reduce(output, {MLP})",
            ],
        ),
        (  # a name that the function has is not taken again
            ["gate = norm(x)", f"return {GATED} + gate"],
            [
                "gate = norm(x)",
                f"gate_output = colwise(self.gate_proj, x, {MLP})",
                f"up = colwise(self.up_proj, x, {MLP})",
                f"return rowwise(self.down_proj, act(gate_output) * up, {MLP}) + gate",
            ],
        ),
        ([f"return colwise(self.up_proj, x, {MLP}) + 1"], None),  # short
        (  # a chain behind one call
            [f"y = colwise(self.q_proj, x, {MLP}, tp_min_local_shape={'s' * 40}).view(shape)"],
            None,
        ),
        ([f"y = {GATED} if x.shape[1] > least else {'z' * 40}"], None),  # it is made sometimes
    ],
)
def test_calls_with_hints_have_lines_of_their_own(
    written: list[str], read: list[str] | None
) -> None:
    text = _file(*written)
    found = with_named_lines(text)
    assert found == _file(*(read or written))
    assert _canonical(found) == _canonical(text)


@pytest.mark.parametrize(
    "lines",
    [
        ["y = f(x)", "z = g(y)", "return z + y + z"],  # read twice
        ["y = f(x)", "x = g(x)", "return x + y"],  # not in the next statement
        ["y = f(x)", "if mask:\n            return y", "return x"],
        ["x = f(x)", "return x"],  # the argument is another one
    ],
)
def test_values_that_others_need_keep_their_names(lines: list[str]) -> None:
    text = _file(*lines)
    assert _canonical(text) == ast.unparse(ast.parse(text))
