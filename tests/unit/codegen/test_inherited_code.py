"""What code has that inherits from other classes: methods of bases, properties, methods of its
config class.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.conftest import Translate
from tests.unit.codegen.test_own_code import _made, _written

BASES = """
class Base(nn.Module):
    def __init__(self, config, bias):
        nn.Module.__init__(self)
        self.proj = nn.Linear(config.size, config.size, bias=bias)

    def forward(self, x, scale=1.0):
        y = self.proj(x)
        return y * scale


class Between(Base):
    def forward(self, x, scale=1.0):
        return super().forward(x, scale=scale) + self.shift


class Toy(Between):
    def __init__(self, config):
        BASE.__init__(self, config, False)
        self.shift = nn.Parameter(torch.ones(config.size))

    def forward(self, x):
        y = x + 1
        x = CALL
        return x * y
"""


@pytest.mark.parametrize(
    ("called", "theirs"),
    [
        ("super().forward(y, scale=2.0)", lambda m, y: m.proj(y) * 2 + m.shift),
        ("Between.forward(self, y, 2.0)", lambda m, y: m.proj(y) * 2 + m.shift),
        ("Base.forward(self, y)", lambda m, y: m.proj(y)),
        ("super(Between, self).forward(y)", lambda m, y: m.proj(y)),
    ],
)
@pytest.mark.parametrize("base", ["Base", "Between"])
def test_methods_of_bases_are_written_where_they_are_called(
    translate: Translate,
    called: str,
    theirs: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
    base: str,
) -> None:
    text = BASES.replace("CALL", called).replace("BASE", base)
    state, init, _ = translate(text, {"size": 4}, specialised=True)
    assert init.count("super().__init__()") == 1
    ours, x = _made(_written(state), {"size": 4}), torch.randn(2, 4)
    torch.nn.init.normal_(ours.shift)
    torch.testing.assert_close(ours(x), theirs(ours, x + 1) * (x + 1))


PROPERTIES = """
class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.size))

    @property
    def doubled(self):
        twice = self.weight * 2
        return twice

    def forward(self, x):
        return x + self.doubled


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.part = Part(config)
        self.proj = nn.Linear(config.size, self.width)

    @property
    def width(self):
        \"\"\"Say how wide it is.\"\"\"
        return self.config.size * 2

    def forward(self, x):
        return self.proj(self.part(x) * self.part.doubled) / self.width
"""


def test_properties_of_modules_are_computed_where_they_are_read(translate: Translate) -> None:
    state, _, _ = translate(PROPERTIES, {"size": 4}, specialised=True)
    part = next(item for cls, item in state.translator.states.items() if cls.__name__ == "Part")
    ours, x = _made(_written(part) + "\n\n\n" + _written(state), {"size": 4}), torch.randn(2, 4)
    twice = 2 * ours.part.weight
    assert ours.proj.weight.shape == (8, 4)
    torch.testing.assert_close(ours(x), ours.proj((x + twice) * twice) / 8)


CONFIGS = """
from types import SimpleNamespace


class Config(SimpleNamespace):
    def sizes(self):
        return {"inner": self.size * self.times(1), "bias": self.bias}

    def times(self, more):
        return more + (2 if self.bias else 1)

    def fill(self, least):
        self.bias = self.kept(bool(self.bias))
        if self.size < least:
            raise ValueError("too small")

    def kept(self, value):
        for _ in [None]:
            return value


class Part(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.proj = nn.Linear(4, sizes["inner"], bias=sizes["bias"])

    def forward(self, x):
        return self.proj(x)


class Toy(nn.Module):
    def __init__(self, config):
        config.fill(least=2)
        super().__init__()
        self.config = config
        self.part = Part(config.sizes())

    def forward(self, x):
        return self.part(x) * self.config.times(0)
"""


def test_methods_of_configs_are_written_where_they_are_called(translate: Translate) -> None:
    for bias in (True, False):
        values = {"size": 4, "bias": bias}
        state, init, forward = translate(CONFIGS, values, specialised=True)
        assert "times" not in init + forward
        assert "sizes(" not in init + forward
        assert "fill" not in init  # it changes nothing
        part = next(item for cls, item in state.translator.states.items() if cls.__name__ == "Part")
        ours, x = _made(_written(part) + "\n\n\n" + _written(state), values), torch.randn(2, 4)
        assert ours.part.proj.weight.shape == (12 if bias else 8, 4)
        assert (ours.part.proj.bias is None) is not bias
        torch.testing.assert_close(ours(x), ours.part.proj(x) * (2 if bias else 1))


NUMBERS = """
def start(depth):
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self._parts(config)

    def _parts(self, config):
        self.gate = nn.Parameter(torch.full((), start(config.size)), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros([]))

    def forward(self, x):
        return x * self.gate * self.scale + self.shift
"""


def test_parameters_without_dimensions_are_parameters(translate: Translate) -> None:
    state, _, _ = translate(NUMBERS, {"size": 4}, specialised=True)
    ours, x = _made("def start(depth): return 0.0\n" + _written(state), {"size": 4}), torch.ones(2)
    assert {key: item.shape for key, item in ours.named_parameters()} == dict.fromkeys(
        ("gate", "scale", "shift"), torch.Size([])
    )
    torch.nn.init.constant_(ours.gate, 3.0)
    torch.testing.assert_close(ours(x), torch.full((2,), 1.5))


REPLACED = """
class First(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.first = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.first(x)


class Second(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.second = nn.Linear(config.size, config.size)
        self.factor = 1 + index

    def forward(self, x):
        return self.second(x) * self.factor


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.part = First(config, index)

    def forward(self, x):
        return x + self.part(x)


class Other(Layer):
    def forward(self, x):
        return super().forward(x) * 3


class Many(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.parts = nn.ModuleList([Layer(config, i) for i in range(2)])

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Plain(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.many = Many(config)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.layers)])
        self.last = Layer(config, 0)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.many(self.last(x))


class Toy(Plain):
    def __init__(self, config):
        super().__init__(config)
        kinds = {"first": First, "second": Second}
        kind = kinds.get(config.kind, First)
        for index, layer in enumerate(self.layers):
            layer.part = kind(config, index)
        LAST
"""


@pytest.mark.parametrize(
    "last",
    [
        "self.last.part = Second(config, 4)",
        "pass",
        "self.many.parts = nn.ModuleList([Other(config, i) for i in range(config.layers)])",
        "self.many.parts[1] = Other(config, 1)",
    ],
)
def test_modules_that_replace_others_of_a_layer_take_their_place(
    translate: Translate, last: str
) -> None:
    values = {"size": 4, "layers": 3, "kind": "second"}
    text = REPLACED.replace("LAST", last)
    state, _, _ = translate(text, values, specialised=True)
    classes = [item for item in state.translator.states.values() if item.cls.__name__ != "Toy"]
    written = "\n\n\n".join(map(_written, (*classes, state)))
    ours, x = _made(written, values), torch.randn(2, 4)
    theirs = type(state.translator.model)(state.translator.config)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


PASSED_ON = """
class Base(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, shift, scale=2.0, **kwargs):
        return (self.proj(x) + shift) * scale


class Part(Base):
    def forward(SIGNATURE):
        return super().forward(CALL) - 1


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = Part(config)

    def forward(self, x):
        return self.part(x, x * 3) + self.part(x, x + 1, scale=4.0)
"""


@pytest.mark.parametrize(
    ("signature", "call"),
    [
        ("self, *args, **kwargs", "*args, **kwargs"),
        ("self, x, *args, **kwargs", "x, *args, **kwargs"),
        ("self, x, *more, scale=2.0", "x, *more, scale=scale"),
    ],
)
def test_what_a_method_takes_for_its_base_is_handed_on(
    translate: Translate, signature: str, call: str
) -> None:
    text = PASSED_ON.replace("SIGNATURE", signature).replace("CALL", call)
    state, _, _ = translate(text, {"size": 4}, specialised=True)
    part = next(item for cls, item in state.translator.states.items() if cls.__name__ == "Part")
    ours, x = _made(_written(part) + "\n\n\n" + _written(state), {"size": 4}), torch.randn(2, 4)
    inner = ours.part.proj(x)
    torch.testing.assert_close(ours(x), (inner + x * 3) * 2 + (inner + x + 1) * 4 - 2)


LEFT = """
class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        gates = self.proj(x).softmax(-1)
        self.loss = gates.sum()
        return gates


class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.router = Router(config)

    def forward(self, x):
        y = x * self.router(x)
        return y, self.router.loss * 0.1


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = Part(config)

    def forward(self, x):
        y, loss = self.part(x)
        total = loss + 1
        return RETURNED
"""


def test_what_a_forward_leaves_at_a_part_is_nothing_that_may_be_read(translate: Translate) -> None:
    state, _, _ = translate(LEFT.replace("RETURNED", "y"), {"size": 4}, specialised=True)
    parts = [item for item in state.translator.states.values() if item.cls.__name__ != "Toy"]
    written = "\n\n\n".join(map(_written, (*parts, state)))
    ours, x = _made(written, {"size": 4}), torch.randn(2, 4)
    torch.testing.assert_close(ours(x), x * ours.part.router.proj(x).softmax(-1))
    with pytest.raises(Untranslatable, match=r"Router\.loss, which its forward leaves there"):
        translate(LEFT.replace("RETURNED", "y * total"), {"size": 4}, specialised=True)


@pytest.mark.parametrize("made", ["config, index", "config, index=index", "config=config"])
def test_arguments_for_a_base_are_taken_by_place_and_by_name(
    made: str, translate: Translate
) -> None:
    text = f"""
class Base(nn.Module):
    def __init__(self, config, index=None):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size, bias=index is not None)

    def forward(self, x):
        return self.proj(x)


class Part(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = 2.0

    def forward(self, x):
        return self.proj(x) * self.scale


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        index = 3
        self.part = Part({made})

    def forward(self, x):
        return self.part(x)
"""
    values = {"size": 4}
    state, _, _ = translate(text, values, specialised=True)
    others = [each for each in state.translator.states.values() if each.cls is not state.cls]
    written = "\n\n\n".join(
        map(_written, (*sorted(others, key=lambda each: len(each.cls.__mro__)), state))
    )
    ours, theirs = _made(written, values), _made(text, values)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(4))
    assert torch.equal(ours(x), theirs(x))


OF_TORCH = """
class Scaled(nn.Linear):
    def __init__(self, inputs, outputs, bias=True, std=None):
        self.std = std
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self):
        if self.std is None:
            super().reset_parameters()
        else:
            nn.init.normal_(self.weight, std=self.std)
            nn.init.normal_(self.bias, std=self.std)


class Named(Scaled):
    pass


class Words(nn.Embedding):
    def __init__(self, count, size, std=None):
        super().__init__(count, size)
        self.std = std


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = Words(9, config.size)
        self.proj = Scaled(config.size, 6, std=0.5)
        self.out = Named(6, config.size, bias=False)

    def forward(self, x):
        return self.out(self.proj(self.words(x)).tanh())
"""


def test_a_class_of_torch_with_a_constructor_of_its_own_keeps_that_forward(
    translate: Translate,
) -> None:
    state, _, _ = translate(OF_TORCH, {"size": 4}, specialised=True)
    bases = {"Scaled": nn.Linear, "Named": nn.Linear, "Words": nn.Embedding}
    texts = []
    for each in state.translator.states.values():
        base = bases.get(each.cls.__name__, nn.Module)
        texts.append(_written(each).replace("(nn.Module)", f"(nn.{base.__name__})", 1))
    ours, original = _made("\n\n".join(texts), {"size": 4}), _made(OF_TORCH, {"size": 4})
    ours.load_state_dict(original.state_dict())
    x = torch.randint(9, (2, 5))
    assert torch.equal(ours(x), original(x))
