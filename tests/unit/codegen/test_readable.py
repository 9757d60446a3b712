"""What a careful person would not have written goes, and only where that changes nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

from onboard.codegen.tidy.conditions import flat
from onboard.codegen.tidy.initial_values import without_initial_values
from onboard.codegen.tidy.known_modules import with_known_modules
from onboard.codegen.tidy.none_tests import is_never_none, without_none_tests
from onboard.codegen.tidy.op_calls import by_keyword
from onboard.codegen.tidy.unread_results import drop_unread_results
from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.output.printer import print_block

Translate = Callable[..., tuple[ClassState, str, str]]
OPS = "torch.ops.onboard."


def _text(body: list[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, body))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            "torch_attention(q, k, v, None, 0.0, True, s, None, None, None, 'bsnd')",
            "torch_attention(q, k, v, scale=s)",
        ),
        (
            "torch_attention(q, k, v, m, 0.0, False)",
            "torch_attention(q, k, v, attn_mask=m, is_causal=False)",
        ),
        (
            "torch_attention(q, k, v, None, 0.0, 1)",
            "torch_attention(q, k, v, is_causal=1)",
        ),  # 1 is not True
        (
            "torch_gated_delta_rule(q, k, v, g, b, None, False)",
            "torch_gated_delta_rule(q, k, v, g, b)",
        ),
        ("torch_rmsnorm(weight=w, eps=1e-06, input=x)", "torch_rmsnorm(x, w, 1e-06)"),
        (
            "torch_moe(x, i, r, a, b, c, g, 'silu', limit=7.0)",
            "torch_moe(x, i, r, a, b, c, is_gated_mlp=g, limit=7.0)",
        ),
        ("torch_l2norm(*both)", None),
        ("torch_anything(x, 1)", None),
        ("torch_rmsnorm(x, w, epsilon=1e-06)", None),
    ],
)
def test_ops_are_called_by_keyword_without_defaults(written: str, read: str | None) -> None:
    body = ast.parse(f"y = f({OPS}{written}, 0.0)").body
    assert _text(by_keyword(body)) == f"y = f({OPS}{read or written}, 0.0)"
    assert _text(body) == f"y = f({OPS}{written}, 0.0)"


@pytest.mark.parametrize(
    ("init", "bias", "dilation"),
    [
        ("self.conv = nn.Conv1d(4, 4, 3, bias=False)", "None", "1"),
        ("self.conv = nn.Conv1d(4, 4, 3, 1, 2, rate)", "self.conv.bias", "self.conv.dilation[0]"),
        (
            "self.conv = nn.Conv1d(4, 4, 3, dilation=rate, bias=biased)",
            "self.conv.bias",
            "self.conv.dilation[0]",
        ),
        ("self.conv = Conv1d(4, 4, 3, bias=False)", "self.conv.bias", "self.conv.dilation[0]"),
        (
            "self.conv = nn.Conv1d(4, 4, 3, bias=False)\nif x:\n    self.conv = make()",
            "self.conv.bias",
            "self.conv.dilation[0]",
        ),
        (
            "self.conv = nn.Conv1d(4, 4, 3, bias=False)\nself.conv.bias = other",
            "self.conv.bias",
            "1",
        ),
    ],
)
def test_what_a_constructor_says_of_a_module_is_known(init: str, bias: str, dilation: str) -> None:
    body = ast.parse("f(self.conv.bias, self.conv.dilation[0], self.conv.weight)").body
    found = with_known_modules(body, ast.parse(init).body)
    assert _text(found) == f"f({bias}, {dilation}, self.conv.weight)"


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("torch.log(torch.empty(n).uniform_(0, 16))", "torch.empty(n)"),
        ("torch.log(torch.arange(1, n + 1))", "torch.empty(n)"),
        ("-torch.arange(n, dtype=torch.float32).exp()", "torch.empty(n, dtype=torch.float32)"),
        ("torch.rand(n, m)", "torch.empty(n, m)"),
        ("torch.log(A)", "torch.empty(2 * n)"),
        ("torch.log(B)", None),  # which of its values, this does not say
        ("torch.ones(n)", None),
        ("torch.arange(1, 2 * n).log()", None),
        ("torch.arange(n)", None),  # whole numbers
        ("torch.log(make(n))", None),
        ("torch.ones(n).outer(torch.rand(m))", None),
    ],
)
def test_parameters_begin_without_the_values_of_training(value: str, shape: str | None) -> None:
    text = f"A = torch.randn(2 * n)\nB = torch.ones(n)\nB = B + 1\nself.a = nn.Parameter({value}, True)"
    found = without_initial_values(ast.parse(text).body)
    assert _text(found[-1:]) == f"self.a = nn.Parameter({shape or value}, True)"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (
            "size = config.size if size is None else size\nself.size = size",
            "size = size\nself.size = size",
        ),
        ("self.size = 4 if size is None else size", "self.size = size"),
        ("if size is not None:\n    a = size\n    b = a\nelse:\n    a = 4", "a = size\nb = a"),
        ("size = other\nself.size = 4 if size is None else size", None),
        (
            "if x:\n    size = other if size is None else size\n    self.size = 4 if size is None else size",
            None,
        ),
        ("for item in items:\n    a = 4 if size is None else size\n    size = None", None),
        ("self.size = 4 if free is None else free", None),
    ],
)
def test_nobody_asks_whether_what_is_given_is_none(text: str, left: str | None) -> None:
    assert _text(without_none_tests(ast.parse(text).body, {"size"})) == (left or text)


@pytest.mark.parametrize(
    ("value", "known"),
    [
        ("4", True),
        ("None", False),
        ("config.size", True),
        ("config.other", False),
        ("self.size", False),
        ("config.other * 4", True),
        ("int(config.other)", True),
        ("make()", False),
        ("4 if x else None", False),
    ],
)
def test_what_is_never_none(value: str, known: bool) -> None:
    node = ast.parse(value, mode="eval").body
    assert is_never_none(node, lambda field: field == "size") is known


ROUTED = """
class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        logits = self.proj(x)
        scale = logits * 2.0
        return logits, scale, logits.topk(2)[1]


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = Router(config)
        {more}

    def forward(self, x):
        _, scale, ids = self.router(x)
        return {returned}
"""


@pytest.mark.parametrize(
    ("more", "returned", "left"),
    [
        ("pass", "x[ids] * scale", "return scale, logits.topk(2)[1]"),
        ("pass", "x[ids]", "return logits.topk(2)[1]"),
        ("pass", "x[ids] * self.router(x)[0]", "return logits, logits.topk(2)[1]"),
        ("pass", "x[ids] * sum(self.router(x))", None),
        (
            "self.others = nn.ModuleList([Router(config) for _ in range(2)])",
            "self.others[0](x)[0] * x[ids]",
            None,
        ),
    ],
)
def test_results_that_no_caller_reads_are_not_returned(
    translate: Translate, more: str, returned: str, left: str | None
) -> None:
    state, _, _ = translate(ROUTED.format(more=more, returned=returned))
    states = list(state.translator.states.values())
    router = next(each for each in states if each.cls.__name__ == "Router").methods["forward"]
    drop_unread_results(states, [])
    assert print_block(router.body).splitlines()[-1] == (
        left or "return logits, scale, logits.topk(2)[1]"
    )
    assert ("scale" in print_block(router.body)) is (left is None or "scale" in left)
    assert router.holes == (3 if left is None else 1 + left.count(", "))
    caller = print_block(state.methods["forward"].body).partition(" = self.router(")[0]
    assert caller.count(",") == router.holes - 1


@pytest.mark.parametrize(
    ("nested", "found"),
    [
        ("a and (b and (c or d))", "a and b and (c or d)"),
        ("(a or b) or c", "a or b or c"),
        ("f(x and (y and z))", "f(x and y and z)"),
        ("a and f(b and c)", None),
    ],
)
def test_conditions_of_one_kind_are_not_nested(nested: str, found: str | None) -> None:
    assert _text(flat(ast.parse(nested).body)) == (found or nested)


def test_conditions_in_a_row_are_not_nested() -> None:
    text = "if a:\n    x = 1\nelif b:\n    x = 2\nelse:\n    x, y = y, (x, 3)\n    z = (*x, 4)"
    assert print_block(ast.parse(text).body) == text
