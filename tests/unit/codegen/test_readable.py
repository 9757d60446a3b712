"""What a careful person would not have written goes, and only where that changes nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
import torch

from onboard.codegen.tidy.choices import only_called, with_joined_choices
from onboard.codegen.tidy.conditions import flat
from onboard.codegen.tidy.initial_values import without_gpus, without_initial_values
from onboard.codegen.tidy.inlined import inline_methods
from onboard.codegen.tidy.inlined_reshapes import folded
from onboard.codegen.tidy.known_modules import with_known_modules
from onboard.codegen.tidy.module_calls import asked_of, with_plain_modules
from onboard.codegen.tidy.named_sizes import with_names
from onboard.codegen.tidy.none_tests import is_never_none, values_for_none, without_none_tests
from onboard.codegen.tidy.op_calls import by_keyword
from onboard.codegen.tidy.reshapes import with_short_shapes
from onboard.codegen.tidy.rotations import with_whole_heads
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
        # 1 is not True
        (
            "torch_attention(q, k, v, None, 0.0, 1)",
            "torch_attention(q, k, v, is_causal=1)",
        ),
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


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("x = x.reshape(x.shape[0], x.shape[1], -1)", "x = x.flatten(2)"),
        ("x = x.view(x.size(0), x.size(1), -1, d)", "x = x.view(*x.shape[:2], -1, d)"),
        ("x = x.view(x.size()[:-1] + (n, d))", "x = x.unflatten(-1, (n, d))"),
        ("x = x.view(*x.shape[:-1], n, a * b)", "x = x.unflatten(-1, (n, -1))"),
        ("s = x.size()[:-2] + (n * d,)\ny = 2\nreturn x.view(s)", "y = 2\nreturn x.flatten(-2)"),
        ("x = x.view(*x.shape[:-1], -1)", None),
        ("x = y.view(b, 1, d)\nreturn f(x.squeeze(1))", "x = y.view(b, d)\nreturn f(x)"),
        ("x = y.view(b, 1, d)\nreturn f(x.squeeze(0))", None),
        ("x = y.view(b, 1, d)\nreturn x + x.squeeze(1)", None),
        ("x = x.view(y.shape[0], y.shape[1], -1)", None),  # another tensor's sizes
        ("x = x.view(x.shape[1], x.shape[0], -1)", None),
        ("s = x.shape[:-1] + (n, d)\nx = f(x)\nx = x.view(s)", None),  # the size of before
        ("s = x.shape[:-1] + (n, d)\nx = x.view(s)\ny = y.view(s)", None),
    ],
)
def test_shapes_say_what_changes(written: str, read: str | None) -> None:
    assert _text(with_short_shapes(ast.parse(written).body)) == (read or written)


def test_shapes_are_the_same_in_either_form() -> None:
    names = {"n": 2, "d": 3, "a": 1, "b": 3}
    for written in (
        "x.reshape(x.shape[0], x.shape[1], -1)",
        "x.view(x.size(0), x.size(1), -1, d)",
        "x.view(x.size()[:-1] + (n, d))",
        "x.view(*x.shape[:-1], n, a * b)",
        "x.view(x.size()[:-2] + (5 * 6,))",
    ):
        (short,) = with_short_shapes(ast.parse(written).body)
        x = torch.randn(3, 4, 5, 6)
        assert torch.equal(
            eval(ast.unparse(short), {**names, "x": x}), eval(written, {**names, "x": x})
        )


ROTATED = (
    "q, k = torch.ops.onboard.torch_rope_with_explicit_cos_sin(q, k, cos, sin, unsqueeze_dim=2)"
)
CUT = (
    "a = q[..., :n]\nb = q[..., n:]\nc = k[..., :n]\nd = k[..., n:]\n"
    f"{ROTATED.replace('q, k', 'a, c')}\n"
    "q = torch.cat((a, b), dim=-1)\nk = torch.cat((c, d), dim=-1)"
)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (CUT, ROTATED),
        (CUT.replace("...", ":, :, :"), ROTATED),
        (CUT.replace("(a, b)", "(b, a)"), None),
        (CUT.replace("b = q[..., n:]", "b = q[..., m:]"), None),
        (CUT.replace("dim=-1", "dim=0"), None),
        (CUT.replace("q[..., ", "q[:, "), None),
        (CUT + "\nreturn a", None),  # the part is read besides
        (CUT.replace("c = k[", "q = f(q)\nc = k["), None),
    ],
)
def test_ops_rotate_the_first_channels_of_whole_heads(written: str, read: str | None) -> None:
    assert _text(with_whole_heads(ast.parse(written).body)) == (read or written)


def test_a_rotation_of_whole_heads_is_that_of_their_first_channels() -> None:
    cos, sin = torch.randn(2, 2, 3, 4)
    q, k = torch.randn(2, 3, 2, 6), torch.randn(2, 3, 1, 6)
    names = {"q": q, "k": k, "cos": cos, "sin": sin, "n": 4, "torch": torch}
    cut, whole = dict(names), dict(names)
    exec(CUT, cut)
    exec(ROTATED, whole)
    assert torch.equal(cut["q"], whole["q"])
    assert torch.equal(cut["k"], whole["k"])


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("x = x.flatten(2)\nreturn f(x)", "return f(x.flatten(2))"),
        ("x = y.transpose(1, 2)\nx = f(x)", "x = f(y.transpose(1, 2))"),
        ("x = x.flatten(2)\nreturn f(x, x)", None),
        ("x = x.flatten(2)\nreturn (x, y)", None),
        ("x = x.flatten(2)\ny = f(x)\nreturn x + y", None),  # read again
        ("x = g(x)\nreturn f(x)", None),
        ("x = g(x)\nx = x.unflatten(-1, (n, d))", "x = g(x).unflatten(-1, (n, d))"),
        ("x = g(x)\nx = y.view(x)", None),
        ("x = x.flatten(2)\nreturn [f(x) for y in z]", None),
        (f"x = x.flatten(2)\nreturn {'f' * 80}(x)", None),  # no room
    ],
)
def test_a_new_shape_stands_where_it_is_used(written: str, read: str | None) -> None:
    assert _text(folded(ast.parse(written).body)) == (read or written)


@pytest.mark.parametrize(
    ("made", "asked", "read"),
    [
        ("nn.Linear(in_features=a, out_features=b, bias=True)", {""}, "nn.Linear(a, b)"),
        ("nn.Conv1d(in_channels=a, kernel_size=k, out_channels=b)", {""}, "nn.Conv1d(a, b, k)"),
        ("nn.Conv1d(a, b, k, groups=g, padding=3)", {"weight"}, "nn.Conv1d(a, b, k, groups=g)"),
        ("nn.Conv1d(a, b, k, padding=3)", {"weight", ""}, None),  # it is called
        ("nn.Conv1d(a, b, k, padding=3)", {"padding"}, None),
        ("nn.Linear(a, b, bias=1)", {""}, None),
        ("Linear(in_features=a, out_features=b, bias=True)", {""}, None),
    ],
)
def test_modules_are_made_without_what_says_nothing(
    made: str, asked: set[str], read: str | None
) -> None:
    body = with_plain_modules(ast.parse(f"self.m = {made}").body, {"m": asked})
    assert _text(body) == f"self.m = {read or made}"


def test_what_is_asked_of_modules() -> None:
    asked = asked_of(
        ast.parse("y = self.a(x)\nz = self.b.weight + self.b.bias\nif self.c: pass").body
    )
    assert asked == {"a": {""}, "b": {"weight", "bias"}, "c": {""}, "weight": {""}, "bias": {""}}


CHOICE = "self.a = f(x) if t is None else None\nself.b = None if t is None else g(x)"


@pytest.mark.parametrize(
    ("called", "read"),
    [
        ({"a", "b"}, "if t is None:\n    self.a = f(x)\nelse:\n    self.b = g(x)"),
        ({"a"}, CHOICE),
    ],
)
def test_modules_of_one_condition_are_made_under_one(called: set[str], read: str) -> None:
    assert _text(with_joined_choices(ast.parse(CHOICE).body, called)) == read


def test_what_is_only_called() -> None:
    code = "y = self.a(x)\nz = self.b.weight\nif self.c is None: self.c(x)\nself.d = 1"
    assert only_called(ast.parse(code).body) >= {"a", "b"}
    assert not only_called(ast.parse(code).body) & {"c", "d"}


HEADS = "self.num_value_heads * self.head_dim"
PROJECTION = (
    "nn.Linear(config.hidden_size, {size}, bias=config.attention_bias, device=config.device)"
)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            [f"self.{key} = {PROJECTION.format(size=HEADS)}" for key in "ab"],
            [
                f"value_heads_dim = {HEADS}",
                *(f"self.{key} = {PROJECTION.format(size='value_heads_dim')}" for key in "ab"),
            ],
        ),
        ([f"self.{key} = f({HEADS})" for key in "ab"], None),  # lines are short enough
        (  # one that may not be there
            [f"self.{key} = {PROJECTION.format(size=HEADS)} if t else None" for key in "ab"],
            None,
        ),
        (
            [
                f"self.{key} = {PROJECTION.format(size=HEADS)}; self.head_dim = f(self.head_dim)"
                for key in "ab"
            ],
            None,
        ),
        (  # the name is taken
            [f"self.{key} = {PROJECTION.format(size=HEADS)}" for key in "ab"]
            + ["return value_heads_dim"],
            None,
        ),
    ],
)
def test_sizes_have_names_where_that_saves_lines(
    written: list[str], read: list[str] | None
) -> None:
    body = ast.parse("\n".join(written)).body
    assert _text(with_names(body)) == _text(ast.parse("\n".join(read or written)).body)


INLINED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size, self.heads = config.size, config.heads
        self.proj = nn.Linear(4, 4)

    def merge(self, x, size):
        if self.heads > 1:
            x = x * size
        return x + self.size

    def forward(self, x):
        {call}
"""


@pytest.mark.parametrize(
    ("call", "forward"),
    [
        (
            "x = self.merge(self.proj(x), self.size)\n        return x",
            "x = self.proj(x)\nif self.heads > 1:\n    x = x * self.size\nreturn x + self.size",
        ),
        (
            "x = self.merge(x, 2)\n        return self.merge(x, 3)",
            "x = self.merge(x, 2)\nreturn self.merge(x, 3)",  # twice
        ),
        (
            "y = self.merge(x, 2)\n        return x + y",
            "y = self.merge(x)\nreturn x + y",  # it would change what is read again
        ),
    ],
)
def test_a_method_that_is_called_once_is_written_there(
    call: str, forward: str, translate: Translate
) -> None:
    state, _, _ = translate(INLINED.format(call=call), {"size": 3, "heads": 2})
    inline_methods([state])
    assert _text(state.methods["forward"].body) == forward


@pytest.mark.parametrize("ends", ["return x", "return 2 * x"])
def test_a_method_that_gives_back_what_it_is_given_leaves_nothing(
    ends: str, translate: Translate
) -> None:
    state, _, _ = translate(
        INLINED.format(call=f"x = self.merge(x, 2)\n        {ends}"), {"size": 3, "heads": 2}
    )
    state.methods["merge"].body[:] = ast.parse("return x").body
    state.methods["merge"].parameters = ["x"]
    inline_methods([state])
    assert _text(state.methods["forward"].body) == ends


@pytest.mark.parametrize(
    ("init", "value"),
    [
        ("self.size = config.size if size is None else size", "config.size"),
        ("size = config.size if size is None else size", "config.size"),
        ("self.size = config.size if size is not None else size", None),
        ("size = f(size)\nself.size = config.size if size is None else size\nsize = 1", None),
        ("self.size = other.size if size is None else size", None),
    ],
)
def test_what_stands_for_a_missing_argument(init: str, value: str | None) -> None:
    found = {key: ast.unparse(node) for key, node in values_for_none(ast.parse(init).body).items()}
    assert found == ({} if value is None else {"size": value})


def test_constructors_put_nothing_on_a_gpu_by_its_name() -> None:
    text = """
a = torch.arange(4, device='cuda').float().to('cuda')
b = torch.ones(4).to(torch.device('cuda:1'), torch.half)
c = torch.ones(4, device=a.device).to(device='cuda')
d = torch.ones(4, device='meta').to('cpu')
"""
    assert (
        "\n".join(map(ast.unparse, without_gpus(ast.parse(text).body)))
        == """\
a = torch.arange(4).float()
b = torch.ones(4).to(torch.half)
c = torch.ones(4, device=a.device)
d = torch.ones(4, device='meta').to('cpu')"""
    )
