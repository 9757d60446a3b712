"""Constructs that code of repositories has and transformers' own has not, in small modules."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import name
from onboard.codegen.translate.language.values import Code
from onboard.codegen.translate.output.printer import print_block
from onboard.hf.old import einops_forms
from tests.unit.codegen.conftest import HEAD

Translate = Callable[..., tuple[Any, str, str]]


def test_functions_inside_others_are_run_where_they_are_called(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config, *args, **kwargs):
        super().__init__()
        def powers(n):
            ratio = 2.0 ** (-8.0 / n)
            return [ratio ** (i + 1) for i in range(n)]
        ratio = lambda factor: factor * config.size
        self.scale = ratio(3) + len(kwargs)
        self.register_buffer("slopes", torch.tensor(powers(config.heads)), persistent=False)

        def gated(x):
            first, second = x.chunk(2, dim=-1)
            return first * second

        self.act = gated

    def forward(self, x):
        return self.act(x) * self.scale + self.slopes.sum()
"""
    state, _, forward = translate(text, {"size": 4, "heads": 8}, specialised=True)
    assert "gated" not in forward
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
    config = {"size": 4, "heads": 8}
    assert torch.equal(_made(_written(state), config)(x), _made(text, config)(x))


def test_a_layer_is_made_in_the_dtype_and_place_that_its_builder_says(
    translate: Translate,
) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        kinds = {"dtype": config.torch_dtype}
        self.first = nn.Linear(config.size, config.size, device=device, dtype=config.torch_dtype)
        self.second = nn.Linear(config.size, 1, bias=False, device=device, **kinds)
        self.register_buffer("steps", torch.arange(3.0).type(config.torch_dtype), persistent=False)

    def forward(self, x):
        return self.second(self.first(x)) + self.steps
"""
    config = {"size": 4, "torch_dtype": torch.float16}
    _, init, _ = translate(text, config, specialised=True)
    assert "dtype" not in init
    assert "device" not in init
    assert "nn.Linear(config.size, 1, bias=False)" in init
    assert "torch.arange(3.0), persistent" in init


def test_what_a_module_or_nothing_has_is_known(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fast = hasattr(torch.nn.functional, "scaled_dot_product_attention") and config.fast

    def forward(self, x, past=None):
        if hasattr(past, "layers") or hasattr(torch, "no_such_thing"):
            x = x * 2
        return x + 1 if self.fast else x
"""
    _, init, forward = translate(text, {"fast": True}, specialised=True)
    assert "hasattr" not in init + forward
    assert "* 2" not in forward


def test_a_list_of_nothing_for_each_layer_is_nothing(translate: Translate) -> None:
    text = """
class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, past=None, head_mask=None):
        if past is not None:
            x = past
        y = self.proj(x)
        return y if head_mask is None else y * head_mask


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])

    def forward(self, x):
        past = tuple([None] * len(self.layers))
        masks = [None for _ in range(len(self.layers))]
        for i, (layer, one) in enumerate(zip(self.layers, past)):
            x = layer(x, past=one, head_mask=masks[i])
        return x
"""
    _, _, forward = translate(text, {"size": 4, "layers": 2})
    assert "zip" not in forward
    assert "x = layer(x)" in forward


@pytest.mark.parametrize(
    ("pattern", "sizes", "same"),
    [
        ("b s (h d) -> b h s d", {"h": 3}, "x.view(2, 5, 3, 4).transpose(1, 2)"),
        ("b s (h d) -> b h d s", {"d": 4}, "x.view(2, 5, 3, 4).permute(0, 2, 3, 1)"),
        ("... (j d) -> ... j d", {"j": 2}, "x.view(2, 5, 2, 6)"),
        ("b s d -> b (s d)", {}, "x.flatten(1)"),
        ("b s d -> b s 1 d", {}, "x.unsqueeze(2)"),
        ("(t b) ... -> t b ...", {"t": 2}, "x.view(2, 1, 5, 12)"),
        ("b ... (j d) -> b ... j d", {"j": 2}, "x.view(2, 5, 2, 6)"),
        ("b s ... -> (b s) ...", {}, "x.flatten(0, 1)"),
        ("b ... -> b 1 ...", {}, "x.unsqueeze(1)"),
        ("b s ... -> s b ...", {}, "x.transpose(0, 1)"),
    ],
)
def test_named_axes_become_methods(
    pattern: str,
    sizes: dict[str, int],
    same: str,
    translate: Translate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    einops = ModuleType("einops")
    monkeypatch.setattr(einops, "rearrange", lambda *_, **__: None, raising=False)
    monkeypatch.setitem(sys.modules, "einops", einops)
    given = "".join(f", {key}={value}" for key, value in sizes.items())
    _, _, forward = translate(
        f"""
from einops import rearrange


class Toy(nn.Module):
    def forward(self, x):
        return rearrange(x, "{pattern}"{given})
"""
        + "    def __init__(self, config):\n        super().__init__()\n"
    )
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(7))
    names: dict[str, Any] = {"x": x}
    exec(f"ours = {forward.removeprefix('return ')}\nsame = {same}", names)
    assert torch.equal(names["ours"], names["same"])


def test_a_repetition_may_have_its_number_in_the_pattern(
    translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    einops = ModuleType("einops")
    monkeypatch.setattr(einops, "repeat", einops_forms.repeat, raising=False)
    monkeypatch.setitem(sys.modules, "einops", einops)
    text = """
from einops import repeat


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.groups = config.groups

    def forward(self, x):
        y = repeat(x[:, :1], "b 1 h d -> b s h d", s=x.shape[1])
        z = repeat(x, "b s h d -> b s (h 2) d") + repeat(x, f"b s h d -> b s (h {self.groups}) d")
        w = repeat(x[0, :, 0], pattern="s d -> () s () (d j)", j=2)
        v = repeat(tensor=x, pattern="... d -> ... d e", e=3)[..., 0]
        return (y + z[:, :, ::2] * w[..., ::2]) * (v == x)
"""
    state, _, forward = translate(text, {"groups": 2}, specialised=True)
    assert forward.count("repeat_interleave") == 4
    x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(8))
    expected = _made(text, {"groups": 2})(x)
    assert torch.equal(expected, x[:, :1] + 2 * x * x[:1, :, :1])
    assert torch.equal(_made(_written(state), {"groups": 2})(x), expected)


def test_tables_that_a_function_is_mapped_over_are_taken_one_by_one(translate: Translate) -> None:
    text = """
def tables(length, size):
    angles = torch.einsum("i , j -> i j", torch.arange(length), 1.0 / torch.arange(1, size + 1))
    return torch.sin(angles), torch.cos(angles)


def turned(x, sincos, offset=0):
    sin, cos = map(lambda t: t[None, offset : x.shape[1] + offset, None, :].repeat(1, 1, 1, 2), sincos)
    return x * cos + x.flip(-1) * sin


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x, position_ids):
        offset = 0
        sincos = tables(x.shape[1] + offset, self.size)
        return turned(x, sincos, offset=offset)
"""
    given = Code(name("position_ids"))
    state, _, _ = translate(
        text, {"size": 3}, specialised=True, counts_positions=True, position_ids=given
    )
    functions = {key: each for key, each in state.translator.functions.items()}
    written = "\n".join(_function(key, each) for key, each in functions.items())
    x = torch.randn(2, 5, 4, 6, generator=torch.Generator().manual_seed(9))
    ours = _made(f"{written}\n\n\n{_written(state)}", {"size": 3})
    positions = torch.arange(5).expand(2, 5)
    expected = _made(text, {"size": 3})(x, positions)
    assert torch.allclose(ours(x, positions), expected)
    assert torch.allclose(ours(x[:, 3:], positions[:, 3:]), expected[:, 3:])


def test_a_list_of_self_that_a_loop_fills_with_modules_is_known(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = []
        for index in range(config.layers):
            kind = nn.Linear if index < config.layers else nn.Bilinear
            self.layers.append(kind(config.size, config.size))
        self.layers = nn.ModuleList(self.layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
    config = {"size": 4, "layers": 2}
    state, _, _ = translate(text, config, specialised=True)
    ours, original = _made(_written(state), config), _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10))
    assert torch.equal(ours(x), original(x))


def test_what_changes_nothing_here_and_parts_that_are_not_there_are_left_out(
    translate: Translate,
) -> None:
    text = """
class Inner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.config.kind = "eager"
        self.extra = config.extra
        self.layers = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(config.layers)])

    def forward(self, x):
        layers = self.layers[: -self.extra] if self.extra > 0 else self.layers
        more = self.layers[-self.extra :] if self.extra > 0 else None
        for layer in layers:
            x = layer(x)
        if more:
            for layer in more:
                x = [x]
                x.append(layer(x[0]))
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Inner(config)

    def forward(self, x):
        output = BaseModelOutputWithPast(last_hidden_state=self.inner(x))
        output["last_hidden_state"] = output["last_hidden_state"].float() * 2
        return output["last_hidden_state"]
"""
    config = {"size": 4, "layers": 2, "extra": 0, "kind": "eager"}
    state, _, _ = translate(text, config, specialised=True)
    (inner,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Inner"]
    assert "config.kind == 'eager'" in [ast.unparse(item) for item in inner.guards]
    ours, original = _made(f"{_written(inner)}\n\n\n{_written(state)}", config), _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(11))
    assert torch.equal(ours(x), original(x))


def _function(name: str, routine: Any) -> str:
    """Return what is left of a function as text."""
    lines = [f"def {name}({', '.join(routine.parameters)}):"]
    return "\n".join([*lines, *("    " + x for x in print_block(routine.body).splitlines())])


def _made(text: str, config: dict[str, Any]) -> Any:
    """Return the module Toy of a text."""
    names: dict[str, Any] = {}
    exec(HEAD + text, names)
    return names["Toy"](SimpleNamespace(**config))


def _written(state: Any) -> str:
    """Return what is left of a class as text."""
    lines = [f"class {state.cls.__name__}(nn.Module):"]
    methods = {"__init__": (state.init.parameters, state.init.body)}
    methods |= {key: (each.parameters, each.body) for key, each in state.methods.items()}
    for key, (parameters, body) in methods.items():
        lines.append(f"    def {key}(self, {', '.join(parameters)}):")
        lines += ["        " + line for line in print_block(body).splitlines()]
    return "\n".join(lines)


def _with_parts(state: Any) -> str:
    """Return what is left of a class and of those that it makes modules of."""
    states = state.translator.states.values()
    parts = [each for each in states if each.cls is not state.cls]
    return "\n\n".join(map(_written, [*parts, state]))


def test_what_asks_for_a_class_of_outputs_or_for_a_package_is_decided(
    translate: Translate,
) -> None:
    text = """
from transformers.integrations.deepspeed import is_deepspeed_available
from transformers.modeling_outputs import MoeModelOutputWithPast

class Inner(nn.Module):
    def forward(self, x):
        if is_deepspeed_available():
            return x.no_such()
        return BaseModelOutputWithPast(last_hidden_state=x * 2)

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        output = self.inner(x)
        if isinstance(output, MoeModelOutputWithPast):
            return output.router_logits
        if isinstance(output, (BaseModelOutputWithPast, MoeModelOutputWithPast)):
            return output.last_hidden_state
        return output[0] + 1
"""
    _, _, forward = translate(text, {}, specialised=True)
    assert forward.splitlines()[-1] == "return self.inner(x)"
    assert "if " not in forward


def test_modules_that_give_different_things_are_told_apart_by_their_class(
    translate: Translate,
) -> None:
    text = """
class Dense(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.proj(x)


class Routed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)
        self.gate = nn.Linear(config.size, 2)

    def forward(self, x):
        logits = self.gate(x)
        return self.proj(x) * logits.sigmoid()[..., :1], (logits, logits.argmax(-1))


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.mlp = Routed(config) if index >= config.dense else Dense(config)

    def forward(self, x):
        y = self.mlp(x)
        if isinstance(y, tuple):
            y, router = y
        else:
            router = None
        return x + y, router


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, index) for index in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x
"""
    config = {"size": 4, "dense": 1}
    state, _, _ = translate(text, config, specialised=True)
    own = {cls.__name__: each for cls, each in state.translator.states.items()}
    layer = print_block(own["Layer"].methods["forward"].body)
    assert "isinstance(self.mlp, Routed)" in layer
    assert "tuple" not in layer
    written = "\n\n\n".join(_written(own[name]) for name in ("Dense", "Routed", "Layer"))
    ours, original = _made(f"{written}\n\n\n{_written(state)}", config), _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours(x), original(x))


def test_weights_that_the_first_forward_changes_are_computed_anew(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head = nn.Linear(config.size, 5, bias=False)
        self.norm_head = config.norm_head

    def forward(self, x):
        if self.norm_head:
            self.head.weight.data = self.head.weight.data / self.head.weight.data.norm(dim=0)
            y = nn.functional.linear(x, self.head.weight.data)
            self.norm_head = False
        else:
            y = self.head(x)
        return y
"""
    config = {"size": 4, "norm_head": True}
    state, _, forward = translate(text, config, specialised=True)
    assert ".data" not in forward
    ours, original = _made(_written(state), config), _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
    expected = original(x)
    assert torch.equal(ours(x), expected)
    assert torch.equal(ours(x), expected)  # nothing is left of the first one


@pytest.mark.parametrize("parameter", ["nn.Parameter", "torch.nn.Parameter"])
def test_a_weight_that_the_first_forward_replaces_is_computed_anew(
    parameter: str, translate: Translate
) -> None:
    text = f"""
class Head(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty((5, size)))
        self.is_new = True

    def forward(self, x):
        if self.training:
            weight = nn.functional.normalize(self.weight)
        elif self.is_new:
            self.is_new = False
            self.weight = {parameter}(nn.functional.normalize(self.weight))
            weight = self.weight
        else:
            weight = self.weight
        return nn.functional.linear(x, weight)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head = Head(config.size)

    def forward(self, x):
        return self.head(x)
"""
    config = {"size": 4}
    state, _, _ = translate(text, config, specialised=True)
    (head,) = (each for cls, each in state.translator.states.items() if cls.__name__ == "Head")
    ours, original = _made(f"{_written(head)}\n\n\n{_written(state)}", config), _made(text, config)
    generator = torch.Generator().manual_seed(seed := int.from_bytes(os.urandom(3), "big"))
    print("seed", seed)
    weight = torch.randn(5, 4, generator=generator)
    for model in (ours, original):
        model.load_state_dict({"head.weight": weight})
    x, expected = torch.randn(2, 4, generator=generator), original.eval()(torch.ones(1, 4))
    assert torch.equal(ours.eval()(torch.ones(1, 4)), expected)
    assert torch.equal(ours(x), original(x))  # whose weight is another by now
    assert torch.equal(ours.head.weight, weight)


def test_a_layer_that_is_torchs_by_another_name_is_torchs(translate: Translate) -> None:
    text = """
class Head(nn.Linear):
    \"\"\"Wrapped by itself in training.\"\"\"

    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class Norm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = Norm(config.size)
        self.head = Head(config.size, 5, bias=False)

    def forward(self, x):
        return self.head(self.norm(x))
"""
    config = {"size": 4}
    state, init, _ = translate(text, config, specialised=True)
    assert "self.head = nn.Linear(config.size, 5, bias=False)" in init
    assert {cls.__name__ for cls in state.translator.states} == {"Toy", "Norm"}


def test_scales_that_a_constructor_works_out_are_numbers_of_attention(translate: Translate) -> None:
    text = """
def magnitude(factor, given):
    if factor <= 1:
        return 1.0
    return 0.1 * given * math.log(factor) + 1.0


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = config.size ** -0.5
        if config.scaling is not None:
            if config.scaling.get("all", 0):
                found = magnitude(config.scaling["factor"], config.scaling["all"])
                self.scale = self.scale * found * found

    def forward(self, x, mask=None):
        q = x.new_empty(x.shape[0], 1, x.shape[1], x.shape[2] + 2)
        q[:, :, :, : x.shape[2]] = x[:, None]
        q[:, :, :, x.shape[2] :] = x[:, None, :, :2]
        hidden = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1)
        scores = torch.matmul(q, q.transpose(2, 3)) * self.scale + hidden
        return torch.matmul(nn.functional.softmax(scores, dim=-1), x[:, None])
"""
    config = {"size": 4, "scaling": {"factor": 8.0, "all": 1.0}}
    state, _, forward = translate(text, config, specialised=True)
    assert "torch_attention(q, q, x[:, None], None, 0.0, True, self.scale" in forward
    assert "slice(" not in forward
    written = text[: text.index("class Toy")] + _written(state)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(_made(written, config)(x), _made(text, config)(x))


def test_weights_in_a_list_that_no_forward_reads_are_kept(translate: Translate) -> None:
    text = """
class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.proj(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = nn.Linear(config.size, config.size)
        self.heads = nn.ModuleList([Head(config) for _ in range(config.heads)])
        self.acts = nn.ModuleList([nn.ReLU() for _ in range(config.heads)])

    def forward(self, x):
        return self.first(x)
"""
    config = {"size": 4, "heads": 2}
    state, init, _ = translate(text, config, specialised=True)
    written = "\n\n\n".join(map(_written, reversed(state.translator.states.values())))
    ours, original = _made(written, config), _made(text, config)
    assert ours.state_dict().keys() == original.state_dict().keys()
    assert "acts" not in init
