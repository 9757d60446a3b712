"""What modules of repositories are given and keep: lists of modules, lists of nothing, tables that were
nothing at first; and what tells tuples, classes and tracers apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

GIVEN = """
class Scale(nn.Module):
    def __init__(self, config, index=0):
        super().__init__()
        self.factor = nn.Parameter(torch.full((config.size,), 0.5 + index))

    def forward(self, x):
        return x * self.factor


class Chain(nn.Module):
    def __init__(self, parts, gate):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.gate = gate

    def forward(self, x):
        for part in self.parts:
            x = part(x) + self.gate(x)
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.chain = Chain(
            parts=[Scale(config, i) for i in range(config.parts)],
            gate=nn.Linear(config.size, config.size, bias=False),
        )

    def forward(self, x):
        return self.chain(x)
"""
POPPED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(3)])

    def forward(self, x, kept=None):
        if kept is None:
            kept = [None for _ in range(len(self.layers))]
        for layer in self.layers:
            before = kept.pop(0) if kept is not None else None
            if before is not None:
                x = torch.cat((before[0], x), dim=1)
            x = layer(x)
        return x
"""
FILLED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.register_buffer("steps", torch.arange(config.size).float(), persistent=False)
        self._table = None
        self._fill(config.size)
        self.bias = nn.Parameter(torch.ones(config.size))
        self.bias.requires_grad = False

    def _fill(self, length):
        if self._table is None:
            self._table = self.steps[:length].cos()

    def forward(self, x):
        return x * self._table + self.bias
"""
CHOSEN = """
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import is_torch_fx_proxy


class Kind(nn.Module):
    def forward(self, x):
        return x


class Other(Kind):
    def __init__(self, parts):
        super().__init__()
        self.wide = next(parts[0].children()).in_features


class Inner(nn.Module):
    def __init__(self, config, parts=None):
        super().__init__()
        self.config = config
        self.mlp = Kind() if parts is None else Other(parts)

    def forward(self, x):
        kind = self.config.kind
        if kind == "odd":
            x = x[[row for row in range(3) if x[row].sum() > 0]]
        else:
            x = x + 1
        if isinstance(self.mlp, Other):
            x = x * self.mlp.wide
        if is_torch_fx_proxy(x) or torch.jit.is_tracing():
            x = x * 2
        return BaseModelOutputWithPast(last_hidden_state=self.mlp(x))


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Inner(config)

    def forward(self, x):
        found = self.inner(x)
        more = None
        if isinstance(found, tuple):
            more = found[1]
            found = found[0]
        return found.last_hidden_state
"""
WRAPPERS = """
class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(x, **kwargs) + x


class PreNorm(nn.Module):
    def __init__(self, size, fn):
        super().__init__()
        self.norm = nn.Linear(size, size)
        self.fn = fn

    def forward(self, x, *args, **kwargs):
        return self.fn(self.norm(x), *args, **kwargs)


class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(size))

    def forward(self, x, shift=None, mask=None):
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return x * self.factor + shift


class Gate(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        return self.inner(x).tanh()


def feed_forward(size):
    return nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.size
        self.layers = nn.ModuleList([])
        for _ in range(config.layers):
            self.layers.append(nn.ModuleList([
                Residual(PreNorm(size, Scale(size))),
                Residual(PreNorm(size, feed_forward(size))),
                PreNorm(size, Gate(size)),
            ]))
        self.last = Residual(nn.Linear(size, size))

    def forward(self, x):
        shift = x.mean()
        for scale, feed, gate in self.layers:
            x = feed(scale(x, shift=shift, mask=None))
            x = gate(x) + x
        return self.last(x)


if __name__ != "builtins":
    from onboard.analysis.blocks.wrapper_classes import telling_wrappers_apart

    Toy.__init__ = telling_wrappers_apart(Toy.__init__, __name__)
"""


KINDS = """
class Plain(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor = config.factor

    def forward(self, x):
        return x * self.factor


class Latent(Plain):
    def forward(self, x):
        return x + self.factor


TABLE = {"eager": Latent, "flash_attention_2": Latent, "mha_eager": Plain, "mla_eager": Latent}


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = TABLE["mha_" + config._attn_implementation](config)

    def forward(self, x):
        return self.attention(x)
"""
VARIABLES = """
import os


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.size, config.size)

    def forward(self, x):
        if os.getenv("ONBOARD_TOY_SCALED", "false").lower() == "true":
            return x * 3
        if os.environ.get("ONBOARD_TOY_NAMED") is not None:
            return x * 2
        return self.gate(x)
"""


def _compare(translate: Translate, text: str, config: dict[str, Any]) -> str:
    state, _, _ = translate(text, config, specialised=True)
    classes = [_written(each) for each in state.translator.states.values()]
    written = "\n\n\n".join([*classes, _written(state)])
    ours, theirs = _made(written, config), _made(text, config)
    for parameter in theirs.parameters():
        parameter.data.uniform_(-1.0, 1.0)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    return written


def test_a_list_of_modules_is_given_to_the_one_that_keeps_it(translate: Translate) -> None:
    written = _compare(translate, GIVEN, {"size": 6, "parts": random.randint(1, 4)})
    assert "nn.ModuleList(parts)" in written


def test_nothing_is_taken_from_a_list_of_nothing(translate: Translate) -> None:
    written = _compare(translate, POPPED, {"size": 6})
    assert "pop" not in written
    assert "cat" not in written


def test_a_table_that_was_nothing_at_first_is_a_buffer(translate: Translate) -> None:
    written = _compare(translate, FILLED, {"size": 6})
    assert "register_buffer('_table', None" in written
    assert "requires_grad" not in written


def test_classes_outputs_and_tracers_decide(translate: Translate) -> None:
    written = _compare(translate, CHOSEN, {"kind": "plain"})
    for gone in ("isinstance", "is_tracing", "proxy", "Other", "for row"):
        assert gone not in written


def test_an_environment_variable_without_a_value_has_its_default(translate: Translate) -> None:
    written = _compare(translate, VARIABLES, {"size": 6})
    for gone in ("environ", "getenv", "* 3", "* 2"):
        assert gone not in written


def test_a_key_may_have_the_way_of_attention_as_a_part(translate: Translate) -> None:
    written = _compare(translate, KINDS, {"_attn_implementation": "eager", "factor": 3.0})
    assert "self.attention = Plain(" in written
    assert "Latent" not in written


def test_a_wrapper_has_a_class_for_each_class_of_modules_that_it_is_given(
    translate: Translate,
) -> None:
    written = _compare(translate, WRAPPERS, {"size": 6, "layers": random.randint(1, 3)})
    for name in ("PreNormScale", "PreNormSequential", "ResidualPreNormScale", "ResidualLinear"):
        assert f"class {name}(nn.Module)" in written
    assert "mask" not in written
