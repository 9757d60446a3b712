"""Blocks of generated files fit on a screen, by passes that change how code reads and nothing
else.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import onboard.ops  # noqa: F401  (registers the ops)
from onboard.analysis.spec_blocks import RopeParameters
from onboard.codegen.hints.unhinted_text import without_hints
from onboard.codegen.tidy.conditions import with_chosen_ops, with_known_ranks
from onboard.codegen.tidy.inlined_reshapes import folded, with_short_arguments
from onboard.codegen.tidy.named_sizes import with_named_arguments
from onboard.codegen.tidy.reshapes import with_short_shapes
from onboard.codegen.tidy.rotations import with_paired_rotations
from onboard.codegen.tidy.rows_in_place import with_rows_in_place, with_rows_looked_up
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.output.hoisted import hoist
from onboard.codegen.translate.output.printer import print_block

ROOT = Path(__file__).parents[3]
Translate = Callable[..., tuple[ClassState, str, str]]
LONGEST, NAMED, WITH_HINTS = 60, 2, 84
"""Lines of a block without what it says of several ranks, those that it has more because layers with
hints have lines of their own, and those of a block with hints.
"""
OPS = "torch.ops.onboard."


def _text(body: list[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, body))


def _lines(node: ast.ClassDef | ast.FunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - min([node.lineno, *(each.lineno for each in node.decorator_list)]) + 1


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.stem)
def test_a_block_fits_on_a_screen(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert _longer(without_hints(text), LONGEST + NAMED) == {}
    assert _longer(text, WITH_HINTS) == {}


def _longer(text: str, longest: int) -> dict[str, int]:
    sizes = {
        block.name: _lines(block)
        for block in ast.parse(text).body
        if isinstance(block, ast.ClassDef | ast.FunctionDef)
    }
    return {name: size for name, size in sizes.items() if size > longest}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("x = f(y)\nz = g(y)\nx = x.view(n)", "x = f(y).view(n)\nz = g(y)"),
        ("x = self.f(y)\nz = g(y)\na, b = x.split(n)", "a, b = self.f(y).split(n)\nz = g(y)"),
        ("x = f(y)\nz = g(y)\na, b = x.split(n)", None),  # more than a layer
        ("x = f(y)\nn = g(y)\nx = x.view(n)", None),  # the size is made between
        ("x = f(y)\nz = g(x)\nx = x.view(n)", None),  # it is read between
        ("x = f(y)\nn[0] = 2\nx = x.view(n)", None),
        ("x = f(y)\nif z:\n    n = 3\nx = x.view(n)", None),
        ("x = self.f(y)\nb = g(y)\na, b = x.split(n)", None),  # b is another one until then
        ("x = self.f(y)\nz = g(y)\na, b = x.split(n)\nreturn x", None),
    ],
)
def test_a_new_shape_stands_where_the_value_is_made(written: str, read: str | None) -> None:
    assert _text(folded(ast.parse(written).body)) == (read or written)


LONG = f"y = {OPS}op({', '.join(f'{letter * 30}' for letter in 'abc')}, z, d)"


@pytest.mark.parametrize(
    ("before", "moved"),
    [
        ("z = -torch.exp(self.A_log.float())", True),
        ("z = -torch.exp(self.A_log.float())\nb = f(c)", True),
        ("z = -torch.exp(x)", False),  # of more than a parameter
        ("z = self.proj(self.A_log)\nself.A_log = b", False),
        ("z = -self.A_log\nreturn_to(z)", False),
    ],
)
def test_a_parameter_in_another_form_stands_where_it_is_used(before: str, moved: bool) -> None:
    body = ast.parse(f"{before}\n{LONG}").body
    found = _text(with_short_arguments(body))
    first, *rest = before.splitlines()
    value = first.removeprefix("z = ")
    expected = [*rest, LONG.replace(" z,", f" {value},")] if moved else [before, LONG]
    assert found == "\n".join(expected)


SIZE = "config.number_of_attention_heads * (self.size_without_rotation + config.size_of_values)"
MADE = f"self.proj = Own(config.rank_of_keys_and_values, {SIZE}, bias=False)"
CONV = (
    "self.conv = nn.Conv1d(self.dim, self.dim, config.size_of_the_kernel, "
    "bias=config.bias_of_the_kernel, groups=self.dim)"
)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            MADE,
            f"width = {SIZE}\nself.proj = Own(config.rank_of_keys_and_values, width, bias=False)",
        ),
        (f"width = 3\n{MADE}", None),  # the name is taken
        (MADE.replace(SIZE, "config.size * 2"), None),  # short enough
        (
            f"self.dim = 2 * config.dim\n{CONV}",
            "dim = 2 * config.dim\nself.dim = dim\n" + CONV.replace("self.dim", "dim"),
        ),
        (f"dim = 3\nself.dim = 2 * config.dim\n{CONV}", None),
        (f"self.dim = 2 * config.dim\n{CONV.replace(', groups=self.dim', '')}", None),
    ],
)
def test_sizes_of_long_calls_have_names(written: str, read: str | None) -> None:
    found = with_named_arguments(ast.parse(written).body, {"Own": ["rank", "width", "bias"]})
    assert _text(found) == (read or written)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("x = x.reshape(*x.shape[:2], n)", "x = x.flatten(2)"),
        ("x = x.reshape(*x.shape[:2], 1)", None),  # it may not have had more dimensions
        ("x = x.reshape(*x.shape[:2], n, d)\nx = x.flatten(2)", "x = x.flatten(2)"),
        ("x = x.reshape(*x.shape[:2], n, d)\ny = f(x)\nx = x.flatten(2)", None),
        ("x = x.reshape(*x.shape[:2], n, d)\nx = x.flatten(1)", None),
        ("x = x.reshape(*x.shape[:2], n, d)\ny = x.flatten(2)\nreturn x", None),
    ],
)
def test_shapes_that_nothing_sees(written: str, read: str | None) -> None:
    assert _text(with_short_shapes(ast.parse(written).body)) == (read or written)


ROPE = f"query, key = {OPS}torch_rope_with_{{kind}}(query, key, cos, sin, unsqueeze_dim=2)"
CHOSEN = (
    "if self.turned:\n    "
    + ROPE.format(kind="qk_interleaving")
    + "\nelse:\n    "
    + ROPE.format(kind="explicit_cos_sin")
)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            CHOSEN,
            f"rope = {OPS}torch_rope_with_explicit_cos_sin\nif self.turned:\n"
            f"    rope = {OPS}torch_rope_with_qk_interleaving\n"
            "query, key = rope(query, key, cos, sin, unsqueeze_dim=2)",
        ),
        ("if a:\n    x = f(y)\nelse:\n    x = f(y)", "x = f(y)"),
        (
            CHOSEN.replace("explicit_cos_sin(query, key, cos", "explicit_cos_sin(query, key, sin"),
            None,
        ),
        (f"rope = 2\n{CHOSEN}", None),  # the name is taken
        (CHOSEN.replace(", cos, sin, unsqueeze_dim=2", ", t"), None),  # short enough
        ("if a:\n    x = f(y)\nelse:\n    x = g(y)", None),  # no ops
        ("if a:\n    x = f(y)", None),
    ],
)
def test_what_two_sides_of_a_condition_do_stands_once(written: str, read: str | None) -> None:
    assert _text(with_chosen_ops(ast.parse(written).body)) == (read or written)


SIDES = "if len(x.shape) == {rank}:\n    y = f(x)\nelse:\n    y = g(x)"


@pytest.mark.parametrize(
    ("before", "rank", "side"),
    [
        (f"x = {OPS}torch_attention(q, k, v)", 5, "y = g(x)"),
        (f"x = {OPS}torch_attention(q, k, v)", 4, "y = f(x)"),
        (f"x = {OPS}torch_attention(q, k, v)\nx = h(x)", 5, None),
        (f"x = {OPS}torch_rmsnorm(q, k, 1.0)", 5, None),
    ],
)
def test_dimensions_of_what_attention_gives_are_known(
    before: str, rank: int, side: str | None
) -> None:
    sides = SIDES.format(rank=rank)
    found = _text(with_known_ranks(ast.parse(f"{before}\n{sides}").body))
    assert found == f"{before}\n{side or sides}"


def test_attention_gives_so_many_dimensions() -> None:
    out = torch.ops.onboard.torch_attention(*torch.randn(3, 2, 5, 4, 8))
    assert out.dim() == 4


PAIRS = {
    "turn": RopeParameters(
        op="torch_rope_with_complex_freqs", unsqueeze_dim=2, single=True, sin_first=True
    )
}
PAIRED = f"{OPS}torch_rope_with_complex_freqs(k, q, torch.complex(cos.float(), sin.float()), 2)"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("k = turn(k, sin, cos)\nq = turn(q, sin, cos)", f"k, q = {PAIRED}"),
        (
            "if a:\n    b = turn(k, sin, cos)\n    c = turn(q, sin, cos)",
            f"if a:\n    b, c = {PAIRED}",
        ),
        ("k = turn(k, sin, cos)\nq = turn(q, cos, sin)", None),
        ("k = turn(k, sin, cos)\nq = turn(k, sin, cos)", None),  # turned twice
        ("k = turn(k, sin, cos)\nq = other(q, sin, cos)", None),
        ("k = turn(k, sin, cos)\nx = f(k)\nq = turn(q, sin, cos)", None),
        ("k = turn(k, sin, cos)", None),
    ],
)
def test_queries_and_keys_are_turned_by_one_op(written: str, read: str | None) -> None:
    assert _text(with_paired_rotations(ast.parse(written).body, PAIRS)) == (read or written)


GATHERED = """table = self.table.repeat(p.shape[0], 1, 1)
index = p.unsqueeze(-1).repeat(1, 1, table.shape[-1])
rows = torch.gather(table, 1, index)"""


@pytest.mark.parametrize(
    ("written", "looked_up"),
    [
        (GATHERED, True),
        (GATHERED.replace("self.table", "self.other"), False),
        (GATHERED.replace("(table, 1", "(table, 0"), False),
        (GATHERED.replace("unsqueeze(-1)", "unsqueeze(1)"), False),
        (GATHERED.replace("p.unsqueeze", "o.unsqueeze"), False),
        (GATHERED.replace("rows =", "p = p + 1\nrows ="), False),
    ],
)
def test_rows_are_looked_up_by_their_positions(written: str, looked_up: bool) -> None:
    *before, last = written.splitlines()
    found = _text(with_rows_looked_up(ast.parse(written).body, {"table"}))
    assert found == "\n".join([*before, "rows = self.table[p]" if looked_up else last])


def test_gathered_rows_are_those_of_the_positions() -> None:
    owner = nn.Module()
    owner.table = torch.randn(7, 3)
    names = {"self": owner, "p": torch.randint(7, (2, 5)), "torch": torch}
    exec(GATHERED, names)
    assert torch.equal(names["rows"], owner.table[names["p"]])  # type: ignore[index,call-overload]


FLAT = """s = z.shape
x = x.reshape(-1, x.shape[-1])
x = self.norm(x, z.reshape(-1, z.shape[-1])).reshape(s)"""


ROWS = "x = self.norm(x.flatten(0, -2), z.flatten(0, -2)).reshape(z.shape)"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (FLAT, ROWS),
        (
            FLAT.replace("z.shape[-1])).reshape(s)", "z.shape[-1])).view(z.shape)"),
            f"s = z.shape\n{ROWS.replace('reshape(z', 'view(z')}",
        ),
        (FLAT + "\nreturn s", f"s = z.shape\n{ROWS}\nreturn s"),
        (FLAT.replace("self.norm", "self.other"), None),
        (FLAT.replace("x = x.reshape", "y = x.reshape"), None),
        (FLAT.replace("(s)", "(t)"), None),
        (FLAT.replace("s = z.shape", "s = z.shape\nz = f(z)"), None),
        (FLAT.replace("-1, z.shape[-1]", "z.shape[0], -1"), None),
    ],
)
def test_norms_get_rows_where_they_are_called(written: str, read: str | None) -> None:
    assert _text(with_rows_in_place(ast.parse(written).body, {"norm"})) == (read or written)


SLOPES = """
def slopes(heads, device):
    found = torch.arange(1, heads + 1, device=device).float()
    if heads > 1:
        found = torch.cat((found, found[:1]), dim=0)
    return found


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        bias = slopes({given}, x.device)
        return x * bias{after}
"""


@pytest.mark.parametrize(
    ("given", "after", "kept"),
    [
        ("self.heads", "", True),
        ("x.shape[0]", "", False),
        ("self.heads", " + slopes(3, x.device)", False),  # called elsewhere, too
    ],
)
def test_what_the_config_alone_says_is_computed_once(
    translate: Translate, given: str, after: str, kept: bool
) -> None:
    state, _, forward = translate(SLOPES.format(given=given, after=after), {"heads": 2})
    assert f"slopes({given}, x.device)" in forward or given != "self.heads", forward
    hoist(state.translator)  # type: ignore[attr-defined]
    assert state.init is not None
    made = f"self.bias = nn.Buffer(slopes({given}), persistent=False)"
    assert (made in print_block(state.init.body)) is kept
    assert ("slopes(" in print_block(state.methods["forward"].body)) is not kept
