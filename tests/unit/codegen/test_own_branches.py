"""Branches of repositories' code that generated code has no use for, or has in another form."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from onboard.analysis.behaviour import half
from onboard.analysis.behaviour.half import same_in_half
from onboard.analysis.tiny.tiny_sizes import VOCABULARY
from onboard.codegen.translate.language.env import Env
from onboard.codegen.translate.language.expressions import half_tests
from onboard.codegen.translate.language.forms import TRIANGLE
from onboard.codegen.translate.language.statements.joins import joined_env
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code, Known
from onboard.hf.old import einops_forms
from tests.unit.codegen.test_own_code import _made, _written

Translate = Callable[..., tuple[Any, str, str]]

NUMBERS = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x):
        if not self.training and ASKED:
            x = torch.nan_to_num(x, nan=0.0, posinf=9.0)
        return x + self.size
"""
ASKED = [
    "torch.isnan(x).any()",
    "(torch.isnan(x).any() or torch.isinf(x).any())",
    "not torch.isfinite(x).all()",
    "torch.any(torch.isinf(x))",
    "not torch.all(torch.isfinite(x)).item()",
]


@pytest.mark.parametrize("asked", ASKED)
def test_numbers_that_are_none_are_replaced_without_a_branch(
    asked: str, translate: Translate
) -> None:
    text = NUMBERS.replace("ASKED", asked)
    state, _, forward = translate(text, {"size": 2}, specialised=True)
    assert "if " not in forward
    assert "torch.where(" in forward
    original, ours = _made(text, {"size": 2}).eval(), _made(_written(state), {"size": 2})
    plain = torch.randn(2, 3, generator=torch.Generator().manual_seed(8))
    for odd in (0.0, float("nan"), float("inf")):
        x = plain.clone()
        x[0, 1] = odd
        for wide in (x, torch.cat([x, torch.full((1, 3), float("inf"))])):
            assert torch.equal(ours(wide).nan_to_num(7.0), original(wide).nan_to_num(7.0))


CLAMPED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x):
        if torch.isinf(x).any():
            limit = torch.finfo(x.dtype).max - 1000
            low = -limit
            x = torch.clamp(x, min=low, max=limit)
        return x * self.size
"""


def test_limits_that_are_made_for_odd_numbers_alone_make_no_branch(translate: Translate) -> None:
    state, _, forward = translate(CLAMPED, {"size": 0.5}, specialised=True)
    assert "if " not in forward
    original, ours = _made(CLAMPED, {"size": 0.5}), _made(_written(state), {"size": 0.5})
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(8))
    for odd in (0.0, float("inf"), -float("inf")):
        x[1, 2] = odd
        assert torch.equal(ours(x), original(x))
        assert ours(x).isfinite().all()


OF_IMAGES = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x):
        if torch.any(x == 300):
            seen = []
            for row in x:
                image = row[1:].tolist()
                seen.append(bytes(image).decode())
            x = x * len(seen)
        return x + self.size
"""


def test_a_branch_of_values_without_translation_is_refused_by_its_test(
    translate: Translate,
) -> None:
    with pytest.raises(Untranslatable, match=r"image first.*, if torch\.any\(x == 300\)"):
        translate(OF_IMAGES, {"size": 2}, specialised=True)


HALF = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        if x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] % 4 == 0:
            x = x.relu()
        else:
            x = x.clamp(min=0)
        return x
"""


@pytest.mark.parametrize("same", [True, False])
def test_paths_of_half_precision_are_left_out_where_they_lead_to_the_same(
    same: bool, translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_tests, "same_in_half", lambda *_: same)
    _, _, forward = translate(HALF, {}, specialised=True)
    assert ("relu" not in forward) is same
    assert ("dtype" not in forward) is same


ONCE = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.done = False

    def forward(self, x):
        if ASKED:
            BODY
        return x + 1
"""
IN_HALF = {
    "x.dtype == torch.float16": {torch.float16},
    "(x.dtype == torch.bfloat16 or x.dtype == torch.float16)": {torch.float16, torch.bfloat16},
    "x.shape[1] > 2 and x.dtype == torch.bfloat16": {torch.bfloat16},
}


@pytest.mark.parametrize("asked", IN_HALF)
def test_what_has_no_translation_is_left_out_of_half_precision_alone(
    asked: str, translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = set()

    def same(_: nn.Module, dtype: torch.dtype) -> bool:
        tried.add(dtype)
        return True

    monkeypatch.setattr(half_tests, "same_in_half", same)
    text = ONCE.replace("ASKED", asked)
    unknown = text.replace("BODY", "x = nowhere.to_be_found(x)")
    _, _, forward = translate(unknown, {}, specialised=True)
    assert forward == "return x + 1"
    assert tried == IN_HALF[asked]
    _, _, forward = translate(text.replace("BODY", "x = x.relu()"), {}, specialised=True)
    assert "relu" in forward
    monkeypatch.setattr(half_tests, "same_in_half", lambda *_: False)
    with pytest.raises(Untranslatable, match="nowhere"):
        translate(unknown, {}, specialised=True)


def test_a_path_that_others_may_take_is_not_left_out(
    translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_tests, "same_in_half", lambda *_: True)
    for asked in ("x.dtype != torch.float16", "x.dtype == torch.float16 or x.shape[1] > 2"):
        text = ONCE.replace("ASKED", asked).replace("BODY", "x = nowhere.to_be_found(x)")
        with pytest.raises(Untranslatable, match="nowhere"):
            translate(text, {}, specialised=True)


class _Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        factor = 2 if input.dtype in (torch.float16, torch.bfloat16) else 1
        return factor * super().forward(input)


def test_a_model_that_computes_something_else_in_half_precision_is_told() -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    assert same_in_half(model)
    assert same_in_half(model, torch.float16)
    half._FOUND.clear()
    odd = model.model.layers[0].mlp.up_proj = _Doubled(32, 32, bias=False)
    nn.init.normal_(odd.weight, std=0.3)
    assert not same_in_half(model.eval())
    assert not same_in_half(model, torch.float16)


SAYING = """
import os

_SAID = False


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)
        global _SAID
        rank = os.environ.get("RANK") or "0"
        if not _SAID and rank == "0":
            _SAID = True
            note = f"size {config.size}"
            if config.size > 3:
                note += ", which is much"
            DOES

    def forward(self, x):
        return self.proj(x)
"""


def test_what_a_constructor_says_once_is_left_out(translate: Translate) -> None:
    _, init, _ = translate(SAYING.replace("DOES", "print(note)"), {"size": 4}, specialised=True)
    lines = ["super().__init__()", "self.proj = nn.Linear(config.size, config.size)"]
    assert init.strip().splitlines() == lines


@pytest.mark.parametrize("does", ["self.note = note", "self.proj.requires_grad_(False)"])
def test_what_a_constructor_does_once_is_not(does: str, translate: Translate) -> None:
    with pytest.raises(Untranslatable, match="the global _SAID"):
        translate(SAYING.replace("DOES", does), {"size": 4}, specialised=True)


TIMED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(3)])

    def forward(self, x):
        import time
        took = {f"layer_{index}": [] for index in range(len(self.layers))}
        begun = time.perf_counter()
        for index, layer in enumerate(self.layers):
            start = time.time()
            x = layer(x)
            took[f"layer_{index}"].append(time.time() - start)
        return x, time.perf_counter() - begun
"""


def test_a_forward_takes_no_time(translate: Translate) -> None:
    state, _, forward = translate(TIMED, {"size": 4}, specialised=True)
    assert "time." not in forward
    assert "took" not in forward
    original, ours = _made(TIMED, {"size": 4}), _made(_written(state), {"size": 4})
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(9))
    assert torch.equal(ours(x), original(x)[0])


LEFT = """
class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        self.seen = x.mean()
        return self.proj(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = Part(config)
        self.part(torch.zeros(1, config.size))

    def forward(self, x):
        return self.part(x) * self.part.seen
"""


def test_a_list_that_nothing_reads_may_be_filled_with_anything(translate: Translate) -> None:
    text = LEFT.replace(
        "return self.part(x) * self.part.seen",
        "seen = []\n        for _ in range(2):\n            x = self.part(x)\n"
        "            seen.append(self.part.seen)\n            x = x + 1\n        READ\n        return x",
    )
    state, _, forward = translate(text.replace("READ", ""), {"size": 4}, specialised=True)
    assert "seen" not in forward
    written = [_written(each) for each in reversed(state.translator.states.values())]
    original, ours = (
        _made(text.replace("READ", ""), {"size": 4}),
        _made("\n\n\n".join(written), {"size": 4}),
    )
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(9))
    assert torch.equal(ours(x), original(x))
    with pytest.raises(Untranslatable, match=r"Part\.seen, which its forward leaves there"):
        translate(text.replace("READ", "x = x * seen[0]"), {"size": 4}, specialised=True)


def test_what_one_forward_leaves_for_another_is_refused_by_name(translate: Translate) -> None:
    with pytest.raises(Untranslatable, match=r"Part\.seen, which its forward leaves there"):
        translate(LEFT, {"size": 4}, specialised=True)


EITHER = """
class Dense(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.proj = nn.Linear(size, size)

    def forward(self, x):
        return self.proj(x)


class Mixture(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.proj = nn.Linear(size, size)

    def forward(self, x):
        return self.proj(x).relu(), x.sum(-1)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mlp = Dense(config.size)
        if config.sparse:
            self.mlp = Mixture(config.size)
        else:
            self.mlp = Dense(config.size)

    def forward(self, x):
        y = self.mlp(x)
        if isinstance(y, tuple):
            y, scores = y
        else:
            scores = None
        return x + y
"""


@pytest.mark.parametrize("sparse", [True, False])
def test_what_is_a_tensor_or_a_tuple_is_asked_for_at_run_time(
    sparse: bool, translate: Translate
) -> None:
    """All layers of the small model have one of both classes, and others of this config may not."""
    config = {"size": 4, "sparse": sparse}
    state, _, forward = translate(EITHER, config)
    assert "isinstance(y, tuple)" in forward
    text = EITHER[: EITHER.index("class Toy")] + _written(state)
    original = _made(EITHER, config)
    ours = _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(9))
    assert torch.equal(ours(x), original(x))


CARRIED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(3)])

    def forward(self, x):
        seen = list()
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return BaseModelOutputWithPast(last_hidden_state=x, hidden_states=seen)
"""


def test_what_every_step_of_a_loop_adds_to_a_list_is_carried_on(translate: Translate) -> None:
    state, _, _ = translate(CARRIED, {"size": 4}, specialised=True)
    original = _made(CARRIED, {"size": 4})
    ours = _made(_written(state), {"size": 4})
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(9))
    found = ours(x)
    found = found[0] if isinstance(found, tuple) else found
    assert torch.equal(found, original(x).last_hidden_state)


HANDED = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size
        self.factor = Toy.powers(config.size)

    @staticmethod
    def powers(size):
        return 2.0 ** size

    def forward(self, x):
        return scaled(self, x) * self.factor


def scaled(module, x):
    return x / module.size
"""


def test_static_methods_and_functions_that_are_given_the_module(translate: Translate) -> None:
    state, _, _ = translate(HANDED, {"size": 4}, specialised=True)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(9))
    assert torch.equal(_made(_written(state), {"size": 4})(x), _made(HANDED, {"size": 4})(x))


NAMED = """
from einops import einsum, repeat


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        rates = repeat(torch.arange(1, config.size + 1), "n -> d n", d=3)
        self.rates = nn.Parameter(torch.log(rates))

    def forward(self, x):
        step = x[..., :3]
        decay = einsum(step, self.rates, "b l d_in, d_in n -> b d_in l n")
        return einsum(decay, x, "b d l n, b l n -> b l d").exp()
"""


def test_products_of_named_axes_are_those_of_letters(
    translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    einops = ModuleType("einops")
    for function in (einops_forms.einsum, einops_forms.repeat):
        monkeypatch.setattr(einops, function.__name__, function, raising=False)
    monkeypatch.setitem(sys.modules, "einops", einops)
    state, init, forward = translate(NAMED, {"size": 4}, specialised=True)
    assert "repeat(" not in init
    assert "torch.einsum('abc,cd->acbd', " in forward
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(3))
    ours = _made(_written(state), {"size": 4})
    rates = torch.arange(1, 5).log().expand(3, 4)
    assert torch.equal(ours.rates, rates)
    expected = [
        [[(x[b, s, d] * rates[d] * x[b, s]).sum().exp() for d in range(3)] for s in range(5)]
        for b in range(2)
    ]
    torch.testing.assert_close(ours(x), torch.tensor(expected))


INSTEAD = """
try:
    from no_such_package import fast

    def scaled(x, factor):
        return fast(x) * factor

except ImportError:

    def scaled(x, factor):
        return x * factor


if SIZE > 3:

    def shifted(x):
        return x + 2

else:

    def shifted(x):
        return x - 2


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.factor = config.size

    def forward(self, x):
        return shifted(scaled(x, self.factor))
"""


@pytest.mark.parametrize("size", [3, 4])
def test_functions_are_those_that_were_defined(size: int, translate: Translate) -> None:
    text = INSTEAD.replace("SIZE", str(size))
    state, _, forward = translate(text, {"size": 3}, specialised=True)
    assert "fast" not in forward
    x = torch.randn(2, 3)
    assert torch.equal(_made(_written(state), {"size": 3})(x), _made(text, {"size": 3})(x))


FILLED_IN = """
class Config:
    attribute_map = {}

    def __init__(self, **values):
        vars(self).update(values)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = FIELD
        if self.scale is None:
            self.scale = 1 / config.size

    def forward(self, x):
        return x * self.scale
"""


@pytest.mark.parametrize(
    "field", ["config.scale", "config.part.scale", "getattr(config, 'scale', None)"]
)
@pytest.mark.parametrize("given", [None, 7.0])
def test_what_a_constructor_fills_in_is_asked_for_before(
    field: str, given: float | None, translate: Translate
) -> None:
    text = FILLED_IN.replace("FIELD", field)
    config = {"size": 4, "scale": given, "part": SimpleNamespace(scale=given)}
    state, _, _ = translate(text, config, specialised=True)
    original, ours = _made(text, config), _made(_written(state), config)
    x = torch.randn(3)
    assert torch.equal(ours(x), original(x))
    told = [eval(ast.unparse(each), {"config": SimpleNamespace(**config)}) for each in state.guards]
    assert all(told), "the model of this config is covered"


def test_what_one_branch_says_of_a_variable_does_not_hold_behind_both() -> None:
    def branch(text: str, form: str | None) -> tuple[list[ast.stmt], Env]:
        env = Env()
        env.values["mask"] = Code(name("mask"), form=form)
        return ast.parse(text).body, env

    frame: Any = None  # of values that are the same code nothing is asked
    triangle = branch("mask = self.bias[:n, :n]", TRIANGLE)
    for other, expected in (
        (branch("mask = stripes(n)", None), None),
        (branch("mask = self.other[:n, :n]", TRIANGLE), TRIANGLE),
    ):
        for sides in ((triangle, other), (other, triangle)):
            assert joined_env(*sides, Known(True), frame).values["mask"].form == expected  # type: ignore[attr-defined]
    known, unknown = branch("", TRIANGLE), branch("", None)
    assert joined_env(unknown, known, Known(True), frame).values["mask"].form == TRIANGLE  # type: ignore[attr-defined]


KEPT_ARGUMENT = """
class Scaled(nn.Module):
    def __init__(self, size, kind="plain", factor=2.0):
        super().__init__()
        self.kind = kind
        self.factor = factor
        self.register_buffer("steps", self._steps(size), persistent=False)

    def _steps(self, size):
        steps = torch.arange(size).float()
        if self.kind == "plain" or self.factor <= 1.0:
            return steps
        return steps / self.factor

    def forward(self, x):
        return x * self.steps


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scaled = Scaled(config.size, kind=config.kind, factor=config.factor)

    def forward(self, x):
        return self.scaled(x)
"""


def test_what_a_constructor_keeps_of_its_arguments_may_be_asked_for(translate: Translate) -> None:
    config = {"size": 3, "kind": "plain", "factor": 4.0}
    state, _, _ = translate(KEPT_ARGUMENT, config, specialised=True)
    inner = next(x for x in state.translator.states.values() if x.cls.__name__ == "Scaled")
    assert [ast.unparse(each) for each in inner.guards] == ["self.kind == 'plain'"]
    assert "self.kind = kind" in map(ast.unparse, inner.init.body), "an assertion reads it"
