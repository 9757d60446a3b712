"""Attention written out by bmm or baddbmm, with ALiBi or without, and what stands around it in such
code.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.codegen.translate.language.args import Args
from onboard.codegen.translate.language.findings import Findings
from onboard.codegen.translate.language.object_values import Config
from onboard.codegen.translate.language.program.classes import Translator
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code, Mask, Value
from onboard.codegen.translate.mechanisms.order import MECHANISMS
from onboard.codegen.translate.output.printer import print_block

HEAD = "import math\nimport torch\nfrom torch import nn\n\n\n"
PROJECTIONS = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.scaled = config.scaled

"""
BMM = (
    HEAD
    + PROJECTIONS
    + """
    def forward(self, x, mask):
        b, s, d = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.view(b, s, self.heads, -1).transpose(1, 2).reshape(b * self.heads, -1, d // self.heads)
        k = k.view(b, s, self.heads, -1).transpose(1, 2).reshape(b * self.heads, -1, d // self.heads)
        v = v.view(b, s, self.heads, -1).transpose(1, 2).reshape(b * self.heads, -1, d // self.heads)
        scores = torch.bmm(q, k.transpose(1, 2)) + mask
        out = torch.bmm(nn.functional.softmax(scores, dim=-1), v)
        return out.view(b, self.heads, s, d // self.heads).transpose(1, 2).reshape(b, s, d)
"""
)
ALIBI = (
    HEAD
    + PROJECTIONS.replace("self.scaled = config.scaled", "self.keys = config.keys")
    + """
    def forward(self, x, mask):
        b, s, d = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.view(b, s, self.heads, -1).transpose(1, 2).reshape(b * self.heads, s, -1)
        k = k.view(b, s, self.heads, -1).transpose(1, 2).reshape(b * self.heads, s, -1)
        v = v.view(b, s, self.heads, -1).transpose(1, 2)
        slopes = torch.pow(0.5, torch.ones(self.heads).cumsum(0)).view(1, self.heads, 1, 1)
        bias = (torch.arange(1 - self.keys, 1).view(1, 1, 1, self.keys) * slopes).squeeze(0)
        first = max(0, bias.size(2) - s)
        bias = bias[:, :, first:].repeat(b, 1, 1)
        scores = bias.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.25)
        weights = nn.functional.softmax(scores.view(b, self.heads, s, -1) + mask, dim=-1)
        return torch.matmul(weights, v).transpose(1, 2).reshape(b, s, d)
"""
)


def translated(
    text: str,
    folder: Path,
    *,
    alibi: bool = False,
    specialised: list[str] | None = None,
    **config: Any,
) -> tuple[str, torch.nn.Module]:
    """Return what is left of the forward of class `Toy`, and a Toy; `specialised`: the guards to
    expect.
    """
    path = folder / f"toy_attention_{abs(hash((text, str(folder))))}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    values = SimpleNamespace(attribute_map={}, heads=4, hidden=32, keys=50, scaled=False, **config)
    model = module.Toy(values)
    model.config = values
    translator = Translator(model, Findings(alibi=alibi), MECHANISMS)
    translator.__dict__["counts_positions"] = True
    translator.specialised = specialised is not None
    config_value = Config(name("config"), translator.config)
    (state,) = translator.reached(translator.construct(module.Toy, Args([config_value], {}, [])))
    given: dict[str, Value] = {"x": Code(name("x"))} | (
        {"mask": Mask()} if "x, mask" in text else {}
    )
    body = print_block(translator._method(state, "forward", Args([], given, [])).body)
    if specialised is not None:
        assert [ast.unparse(guard) for guard in state.guards] == specialised
    return body, model


def run(body: str, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run translated code."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    names: dict[str, Any] = {"torch": torch, "math": math}
    exec(f"def forward(self, x):\n{lines}", names)
    return names["forward"](model, x)


def causal(length: int) -> torch.Tensor:
    return torch.full((length, length), -torch.inf).triu(1)


@pytest.mark.parametrize(("text", "alibi"), [(BMM, False), (ALIBI, True)])
@torch.no_grad()
def test_attention_by_bmm_is_the_canonical_op_with_heads_apart(
    text: str, alibi: bool, tmp_path: Path
) -> None:
    body, model = translated(text, tmp_path, alibi=alibi)
    assert "torch_attention" in body
    assert "flatten(0, 1)" not in body
    assert "unsqueeze(0)" not in body
    assert ("alibi_slopes=bias" in body) is alibi
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(run(body, model, x), model(x, causal(7)))


GATED = (
    HEAD
    + """
class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs().sqrt()


ACTIVATIONS = {"relu": nn.ReLU(), "tanh": nn.Tanh()}


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.register_buffer("lower", torch.tril(torch.ones(50, 50)).view(1, 1, 50, 50), persistent=False)
        self.act = ACTIVATIONS[config.name]

    def forward(self, x):
        w = torch.matmul(x, x.transpose(-1, -2)) / math.sqrt(x.size(-1))
        b = self.lower[:, :, : w.size(-2), : w.size(-1)]
        w = w * b + -10000.0 * (1 - b)
        return self.act(Root.apply(torch.matmul(nn.functional.softmax(w, dim=-1), x)))
"""
)


@torch.no_grad()
def test_a_causal_triangle_that_is_multiplied_in_is_the_mask(tmp_path: Path) -> None:
    body, model = translated(GATED, tmp_path, name="tanh")
    assert "torch_attention(x, x, x, None, 0.0, True" in body
    assert "lower" not in body
    x = torch.randn(2, 4, 7, 8)
    torch.testing.assert_close(run(body, model, x), model(x))


@pytest.mark.parametrize("change", ["torch.ones(50, 50) * 0.5)", "torch.ones(50, 50), 1)"])
def test_another_buffer_is_no_mask_of_its_own(change: str, tmp_path: Path) -> None:
    body, _ = translated(GATED.replace("torch.ones(50, 50))", change), tmp_path, name="tanh")
    assert "self.lower" in body
    assert "torch_attention" not in body


SWITCHED = (
    HEAD
    + """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.narrow = config.narrow
        self.wide = config.wide
        if config.narrow and config.hidden > 8:
            self.one = nn.Linear(8, 8)

    def forward(self, x):
        if self.wide or not self.narrow:
            x = x * 2
        else:
            x = self.one(x)
        return x
"""
)


@pytest.mark.parametrize(
    ("config", "guards"),
    [
        (
            {"narrow": True, "wide": False},
            ["config.narrow", "config.hidden > 8", "not config.wide"],
        ),
        ({"narrow": False, "wide": False}, ["not config.narrow"]),
        ({"narrow": False, "wide": True}, ["not config.narrow", "config.wide"]),
    ],
)
def test_a_branch_that_this_config_decides_is_guarded_by_what_decides_it(
    config: dict[str, bool], guards: list[str], tmp_path: Path
) -> None:
    body, _ = translated(SWITCHED, tmp_path, specialised=guards, **config)
    assert "if" not in body
    assert ("self.one" in body) is config["narrow"]


BIASED = (
    HEAD
    + """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x, mask):
        kept = x.sum(-1)[:, :, None, :].expand(-1, -1, x.shape[2], -1).masked_fill(mask[:, :, :, :9] != 0, -1e9)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", None)
        return attend(self, x, x, x, kept, scaling=0.5)[0] + attend(self, x, x, x, mask, position_bias=x.sum())[0]
"""
)


def test_a_mask_with_more_in_it_and_a_bias_of_positions_are_added_to_the_scores(
    tmp_path: Path,
) -> None:
    body, _ = translated(BIASED, tmp_path)
    assert "torch.ones_like(" in body
    assert "torch_attention(x, x, x, kept, 0.0, True, 0.5" in body
    assert "torch_attention(x, x, x, x.sum(), 0.0, True" in body


GROUPED = (
    HEAD
    + """
def repeat_kv(hidden_states, n_rep):
    batch, heads, length, size = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, heads, n_rep, length, size)
    return hidden_states.reshape(batch, heads * n_rep, length, size)


def interleaved(hidden_states, n_rep):
    return hidden_states.repeat(1, n_rep, 1, 1)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.groups = config.groups
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.q = nn.Linear(config.hidden, 32)
        self.k = nn.Linear(config.hidden, 16)
        self.v = nn.Linear(config.hidden, 16)

    def forward(self, x, mask):
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 8).transpose(1, 2)
        k = self.k(x).view(b, s, 2, 8).transpose(1, 2)
        v = self.v(x).view(b, s, 2, 8).transpose(1, 2)
        REPEAT
        w = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(8) + mask
        w = nn.functional.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(w, v).transpose(1, 2).contiguous().reshape(b, s, 32)
"""
)
REPEATS = {
    "helper": "k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)",
    "method": "k = k.repeat_interleave(self.groups, dim=1)\n        v = v.repeat_interleave(self.groups, 1)",
    "function": "k, v = (torch.repeat_interleave(y, dim=1, repeats=self.groups).contiguous() for y in (k, v))",
}


@pytest.mark.parametrize("form", REPEATS)
@torch.no_grad()
def test_heads_repeated_for_grouped_queries_are_left_to_the_op(form: str, tmp_path: Path) -> None:
    body, model = translated(GROUPED.replace("REPEAT", REPEATS[form]), tmp_path, groups=2)
    assert "repeat" not in body
    assert "torch_attention(q, k, v, None" in body
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(run(body, model, x), model(x, causal(7)))


@torch.no_grad()
def test_heads_repeated_in_another_order_are_repeated(tmp_path: Path) -> None:
    change = "k, v = interleaved(k, self.groups), interleaved(v, self.groups)"
    body, model = translated(GROUPED.replace("REPEAT", change), tmp_path, groups=2)
    assert ".repeat(1, self.groups, 1, 1)" in body
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(run(body, model, x), model(x, causal(7)))


READERS = {
    "sum": "k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)\n        v = v + k",
    "norm": "k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)\n        v = self.norm(v)",
    "branch": "if self.groups > 1:\n            k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)",
    "keys": "k = repeat_kv(k, self.groups)\n        v = v.repeat(1, 2, 1, 1)",
    "item": "k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)\n        v = v[..., :4].repeat(1, 1, 1, 2)",
}


@pytest.mark.parametrize("reader", READERS)
@torch.no_grad()
def test_repeated_heads_that_something_else_reads_are_repeated(reader: str, tmp_path: Path) -> None:
    change = READERS[reader]
    body, model = translated(GROUPED.replace("REPEAT", change), tmp_path, groups=2)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(run(body, model, x), model(x, causal(7)))


CAPPED = (
    HEAD
    + PROJECTIONS
    + """
    def forward(self, x, mask):
        b, s, d = x.shape
        q, k, v = (each.view(b, s, self.heads, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        w = torch.matmul(q, k.transpose(2, 3)) * 0.25
        CAP
        w = nn.functional.softmax(w + mask, dim=-1)
        return torch.matmul(w, v).transpose(1, 2).reshape(b, s, d)
"""
)
CAPS = [
    ("w = 3 * torch.tanh(w / 3)", "0.25, None, None, 3, 'bnsd')"),
    ("w = w / 2.5\n        w = w.tanh() * 2.5", "0.25, None, None, 2.5, 'bnsd')"),
    ("w = torch.tanh(w)", "0.25, None, None, 1.0, 'bnsd')"),
    ("w = 2.0 * torch.tanh(w / 3.0)", "None, None, 2.0, 'bnsd')"),
]


@pytest.mark.parametrize(("cap", "said"), CAPS)
@torch.no_grad()
def test_scores_with_a_soft_cap_are_the_canonical_op(cap: str, said: str, tmp_path: Path) -> None:
    body, model = translated(CAPPED.replace("CAP", cap), tmp_path)
    assert "torch_attention" in body
    assert "tanh" not in body
    assert said in body
    x = 3 * torch.randn(2, 7, 32)
    torch.testing.assert_close(run(body, model, x), model(x, causal(7)))


@torch.no_grad()
def test_a_cap_behind_the_mask_is_none_of_the_op(tmp_path: Path) -> None:
    text = CAPPED.replace("CAP", "w = torch.tanh(w + mask)").replace("w + mask, dim", "w, dim")
    with pytest.raises(Untranslatable, match="read once they are masked"):
        translated(text, tmp_path)


LATENT = """
import torch
from torch import nn


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.size = config.heads, config.hidden // config.heads
        self.q = nn.Linear(config.hidden, config.hidden + config.heads * 2)
        self.kv = nn.Linear(config.hidden, self.size + 2)

    def forward(self, x, mask):
        q = self.q(x).view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)
        q, turned = torch.split(q, [self.size, 2], dim=-1)
        latent, key = torch.split(self.kv(x), [self.size, 2], dim=-1)
        scores = torch.matmul(turned, key.unsqueeze(1).mT) + torch.matmul(q, latent.unsqueeze(-3).mT)
        weights = nn.functional.softmax(scores * 0.3 + mask, dim=-1)
        out = torch.einsum("bhql,blc->bhqc", weights, latent)
        return out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
"""


@torch.no_grad()
def test_scores_that_are_a_sum_of_two_products_are_one_of_longer_vectors(tmp_path: Path) -> None:
    body, model = translated(LATENT, tmp_path)
    assert "torch_attention" in body
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(run(body, model, x), model(x, causal(7)))


@pytest.mark.parametrize("change", [("mT) +", "mT) * 0.5 +"), ("mT) +", "mT) -")])
def test_products_of_which_one_is_changed_before_are_not(
    change: tuple[str, str], tmp_path: Path
) -> None:
    body, _ = translated(LATENT.replace(*change), tmp_path)
    assert "torch_attention" not in body
