"""What constructors and forwards of repositories hold in variables: modules in lists, settings that
functions inside read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

ACTS = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lin = nn.Linear(config.size, config.size)
        KEEP
        slope = config.slope * 2

        def bent(x):
            return torch.where(x > config.least, x, x * slope)

        self.act = bent

    def forward(self, x):
        return self.act(self.lin(x))
"""
HEADS = """
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lin = nn.Linear(config.size, config.size)

    def forward(self, x, mask=None):
        return self.lin(x).tanh()


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.heads = nn.ModuleList([Block(config) for _ in range(2)])
        self.scales = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(3)])

    def forward(self, x, all_heads=False):
        for layer in self.layers[:-1]:
            x = layer(x)
        run = [self.layers[-1]] + list(self.heads) if all_heads else [self.layers[-1]]
        found = []
        for index, layer in enumerate(run):
            y = layer(x)
            found.append(self.scales[index](y))
        return torch.stack(found, dim=-1)[..., 0]
"""

DICTS = """
class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lin = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.lin(x).tanh()


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parts = nn.ModuleDict()
        for index in range(config.parts):
            self.parts[f"part_{index}"] = Part(config)

    def forward(self, x):
        for index, part in enumerate(self.parts.values()):
            x = x + part(x) * index
        for key, part in self.parts.items():
            x = part(x) if key == "part_1" else x
        return x
"""

LATER = """
class Attn(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.q = nn.Linear(config.size, config.size)
        self.k = nn.Linear(config.size, config.size)
        behind = layer_idx - config.kv
        if layer_idx >= config.kv:
            self.q2 = nn.Linear(config.size, config.size)
            if behind % config.group == 0:
                self.k2 = nn.Linear(config.size, config.size)

    def forward(self, x, keys=None):
        if keys is not None:
            q = self.q2(x)
            k = keys
        else:
            q = self.q(x)
            k = self.k(x)
        return q * k, None


class Layer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = Attn(config, layer_idx)

    def forward(self, x, keys=None, output=False):
        x, w = self.attn(x, keys=keys)
        outputs = (x,)
        if output:
            outputs += (w,)
        return outputs


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.layers)])
        self.norm = nn.Linear(config.size, config.size)

    def forward(self, x):
        kept = {}
        num = self.config.kv or self.config.layers
        for layer_idx, layer in enumerate(self.layers):
            if self.config.swift and layer_idx == num:
                h = self.norm(x)
                for i, other in enumerate(self.layers[num:]):
                    kept[layer_idx + i] = (
                        other.attn.k2(h) if i % self.config.group == 0 else kept[layer_idx + i - 1]
                    )
            x = layer(x, kept.get(layer_idx, None))[0]
        return x
"""


@pytest.mark.parametrize("keep", ["self.config = config", "pass"])
def test_functions_keep_the_settings_that_they_read(translate: Translate, keep: str) -> None:
    text = ACTS.replace("KEEP", keep)
    config = {"size": 4, "slope": 0.3, "least": 0.1}
    state, _, _ = translate(text, config, specialised=True)
    _same(state, text, config)


@pytest.mark.parametrize("mask", ["torch.ge(x, config.least)", "x > config.least", "0.1 < x"])
def test_items_that_a_comparison_tells_are_chosen(translate: Translate, mask: str) -> None:
    body = f"""y = torch.zeros_like(x)
            mask = {mask}
            y[mask] = x[mask]
            return y"""
    text = ACTS.replace("return torch.where(x > config.least, x, x * slope)", body)
    text = text.replace("KEEP", "self.config = config")
    config = {"size": 4, "slope": 0.3, "least": 0.1}
    state, _, forward = translate(text, config, specialised=True)
    assert "torch.where(mask" in forward
    _same(state, text, config)


def test_rows_that_a_comparison_tells_are_chosen_whole(translate: Translate) -> None:
    body = """y = torch.zeros_like(x)
            mask = x.sum(-1) > config.least
            y[mask] = x[mask]
            return y"""
    text = ACTS.replace("return torch.where(x > config.least, x, x * slope)", body)
    text = text.replace("KEEP", "self.config = config")
    config = {"size": 4, "slope": 0.3, "least": 0.1}
    state, _, forward = translate(text, config, specialised=True)
    assert "torch.where(mask.flatten()[:, None]" in forward
    _same(state, text, config)


def test_functions_that_read_a_tensor_of_the_constructor_are_refused(translate: Translate) -> None:
    text = ACTS.replace("slope = config.slope * 2", "slope = torch.ones(config.size)")
    config = {"size": 4, "slope": 0.3, "least": 0.1}
    with pytest.raises(Untranslatable, match="bent, which reads variables of a constructor"):
        translate(text.replace("KEEP", "pass"), config, specialised=True)


def test_modules_in_a_list_are_called_one_by_one(translate: Translate) -> None:
    config = {"size": 4, "layers": 3}
    state, _, forward = translate(HEADS, config, specialised=True)
    assert "enumerate" not in forward
    _same(state, HEADS, config, _written(_state(state, "Block")))


def test_dicts_of_modules_are_gone_through(translate: Translate) -> None:
    config = {"size": 4, "parts": 3}
    state, _, _ = translate(DICTS, config, specialised=True)
    _same(state, DICTS, config, _written(_state(state, "Part")))


def test_a_method_without_a_translation_is_named(translate: Translate) -> None:
    text = DICTS.replace("self.parts.values()", "self.parts.popitem()")
    with pytest.raises(Untranslatable, match="the method popitem of a ModuleList"):
        translate(text, {"size": 4, "parts": 3}, specialised=True)


def test_what_a_dict_may_lack_may_be_none(translate: Translate) -> None:
    config = {"size": 4, "layers": 4, "kv": 2, "group": 2, "swift": True}
    state, _, _ = translate(LATER, config, specialised=True)
    parts = [_written(_state(state, name)) for name in ("Attn", "Layer")]
    assert "keys is not None" in parts[0]
    _same(state, LATER, config, *parts)


def _state(state: Any, name: str) -> Any:
    states = state.translator.states.items()
    return next(each for cls, each in states if cls.__name__ == name)


def _same(state: Any, text: str, config: dict[str, Any], *others: str) -> None:
    written = "\n\n\n".join((*others, _written(state)))
    ours, original = _made(written, config), _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours(x), original(x))
