"""What repositories' code keeps between calls, or in objects that are no modules, in small modules."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code
from tests.unit.codegen.test_own_code import _function, _made, _written

Translate = Callable[..., tuple[Any, str, str]]

KEPT_TABLE = """
table = None

def angles(length, size):
    global table
    if table is None or table.shape[0] < length:
        table = torch.outer(torch.arange(2 * length).float(), 1.0 / torch.arange(1, size + 1))
    return torch.sin(table[:length]), torch.cos(table[:length])


def paired(m):
    rows = m.shape[0]
    return m.view(-1, 1).repeat(1, 2).view(rows, -1)


def turned(x, both):
    sin, cos = map(lambda t: paired(t)[None, : x.shape[1], None, :], both)
    return x * cos + x.flip(-1) * sin


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x, position_ids):
        return turned(x, angles(x.shape[1], self.size))
"""


def test_a_table_that_a_function_keeps_in_its_module_is_made_at_each_call(
    translate: Translate,
) -> None:
    given = Code(name("position_ids"))
    state, _, _ = translate(
        KEPT_TABLE, {"size": 3}, specialised=True, counts_positions=True, position_ids=given
    )
    functions = state.translator.functions.items()
    written = "\n".join(_function(key, each) for key, each in functions)
    assert "global" not in written
    x = torch.randn(2, 7, 4, 6, generator=torch.Generator().manual_seed(9))
    ours = _made(f"{written}\n\n\n{_written(state)}", {"size": 3})
    positions = torch.arange(7).expand(2, 7)
    expected = _made(KEPT_TABLE, {"size": 3})(x, positions)
    assert torch.allclose(ours(x[:, :2], positions[:, :2]), expected[:, :2])
    assert torch.allclose(ours(x, positions), expected)
    assert torch.allclose(ours(x[:, 3:], positions[:, 3:]), expected[:, 3:])


def test_a_global_that_begins_as_something_is_refused(translate: Translate) -> None:
    text = KEPT_TABLE.replace("table = None\n", "table = torch.ones(2, 3)\n")
    with pytest.raises(Untranslatable, match="the global table"):
        translate(
            text,
            {"size": 3},
            specialised=True,
            counts_positions=True,
            position_ids=Code(name("position_ids")),
        )


SEQUENCE = """
class First(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.words, config.size)

    def forward(self, ids):
        return self.table(ids)


class Layer(nn.Module):
    def __init__(self, config, index=None):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, other=None):
        return x + self.proj(x if other is None else other)


class Last(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.Linear(config.size, 2)

    def forward(self, x):
        return self.norm(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        modules = [First(config)]
        modules += [Layer(config, index=i) for i in range(config.layers)]
        modules.append(Last(config))
        self.layers = nn.Sequential(*modules)

    def forward(self, x):
        x = self.layers[0](x)
        for module in self.layers[1:-1]:
            x = module(x, other=None)
        return self.layers[-1](x)
"""


@pytest.mark.parametrize("is_called", [False, True])
def test_a_sequence_of_different_modules_is_taken_apart(
    is_called: bool, translate: Translate
) -> None:
    config = {"size": 4, "words": 9, "layers": 3}
    text = SEQUENCE
    if is_called:
        text = (
            text[: text.index("        x = self.layers[0](x)")] + "        return self.layers(x)\n"
        )
    state, init, forward = translate(text, config, specialised=True)
    assert "*[Layer(" in init
    assert ("layer(hidden_states)" if is_called else "module(x)") in forward
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    written = "\n\n\n".join(map(_written, (*parts, state)))
    ours, original = _made(written, config), _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.arange(9)[None]
    assert torch.equal(ours(x), original(x))


@pytest.mark.parametrize("place", ["1", "-2", "config_index"])
def test_a_place_in_a_sequence_may_have_any_class_where_it_cannot_be_told(
    place: str, translate: Translate
) -> None:
    text = SEQUENCE.replace("self.layers[-1](x)", f"self.layers[{place}](x, x)")
    text = text.replace("config_index", "x.shape[0]")
    with pytest.raises(Untranslatable):
        translate(text, {"size": 4, "words": 9, "layers": 3}, specialised=True)


def test_an_empty_list_of_modules_may_be_filled_later(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(config.layers):
            self.layers.append(nn.Linear(config.size, config.size))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
    config = {"size": 4, "layers": 2}
    state, _, _ = translate(text, config, specialised=True)
    ours, original = _made(_written(state), config), _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    assert torch.equal(ours(x), original(x))


def test_what_a_method_gives_a_constructor_is_written_into_it(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.size = config.size
        self.register_buffer("factors", self._factors(device), persistent=False)

    def _factors(self, device):
        return 1.0 / torch.arange(1, self.size + 1, device=device)

    def forward(self, x):
        again = self._factors(x.device)
        return x * self.factors + again
"""
    config = {"size": 6}
    state, init, _ = translate(text, config, specialised=True)
    assert "_factors" not in init
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(_made(_written(state), config)(x), _made(text, config)(x))


def test_rows_of_tables_keep_the_shape_that_code_asks_for(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.size

    def forward(self, x, position_ids):
        t = torch.arange(x.shape[1])
        table = torch.outer(t, 1.0 / torch.arange(1, self.size + 1)).cos()[0:]
        length, half = table.shape
        rows = table[: x.shape[1]]
        return x[..., : half * 2] * torch.cat((rows, rows), dim=-1) * table.size(1) * table.size(-1)
"""
    config, given = {"size": 3}, Code(name("position_ids"))
    state, _, _ = translate(
        text, config, specialised=True, counts_positions=True, position_ids=given
    )
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(5).expand(2, 5)
    ours, expected = _made(_written(state), config), _made(text, config)(x, positions)
    assert torch.allclose(ours(x, positions), expected)
    assert torch.allclose(ours(x[:, 2:], positions[:, 2:]), expected[:, 2:])


HELPER = """
def paired(m):
    rows = m.shape[0]
    return m.view(-1, 1).repeat(1, 2).view(rows, -1)


class Turning:
    base = 100

    def __init__(self, longest, size):
        super(Turning, self).__init__()
        self.longest = longest
        self.size = size
        self.sin = None
        self.cos = None

    def tables(self, x, offset):
        if self.sin is not None and self.cos is not None and x.device == self.sin.device:
            sin, cos = self.sin, self.cos
        else:
            powers = torch.arange(0, self.size, 2, device=x.device) / self.size
            angles = torch.einsum("i , j -> i j", torch.arange(self.longest), 1.0 / self.base**powers)
            sin, cos = torch.sin(angles).to(x.dtype), torch.cos(angles).to(x.dtype)
            sin, cos = map(paired, (sin, cos))
            self.sin = sin
            self.cos = cos

        def of_text(t):
            return t[None, offset : x.shape[1] + offset, None, :]

        sin, cos = map(of_text, (sin, cos))
        return sin, cos

    def turned(self, x, offset=0):
        def swapped(x):
            x = torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1)
            return x.flatten(-2)

        sin, cos = self.tables(x, offset)
        return x * cos + swapped(x) * sin


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.kind == "turned":
            longest = config.longest
            self.helper = Turning(longest, config.size)
        else:
            self.helper = None

    def forward(self, x, position_ids):
        y = x * 2
        if self.helper is not None:
            x = self.helper.turned(x)
            y = self.helper.turned(y, offset=0)
        return x + y
"""


def test_what_an_object_keeps_and_does_is_its_modules(translate: Translate) -> None:
    config = {"longest": 16, "size": 6, "kind": "turned"}
    given = Code(name("position_ids"))
    state, init, forward = translate(
        HELPER, config, specialised=True, counts_positions=True, position_ids=given
    )
    assert "Turning" not in init + forward
    assert "self.helper_longest = longest" in init
    assert forward.count("torch.sin") == 1  # what the first call keeps, the second finds
    x = torch.randn(2, 7, 4, 6, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(7).expand(2, 7)
    ours, expected = _made(_written(state), config), _made(HELPER, config)(x, positions)
    assert torch.allclose(ours(x, positions), expected)
    assert torch.allclose(ours(x[:, 3:], positions[:, 3:]), expected[:, 3:])


def test_an_object_that_is_passed_on_is_refused(translate: Translate) -> None:
    text = HELPER.replace("y = x * 2", "y = x * torch.tensor(self.helper)")
    with pytest.raises(Untranslatable, match="Turning elsewhere"):
        translate(
            text,
            {"longest": 16, "size": 6, "kind": "turned"},
            specialised=True,
            counts_positions=True,
            position_ids=Code(name("position_ids")),
        )


def test_the_side_of_a_conditional_that_this_config_has_is_taken(translate: Translate) -> None:
    text = """
class Gated(nn.Module):
    def forward(self, x, y):
        return x * nn.functional.silu(y)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.kind == "gated"
        self.first = nn.Linear(config.size, config.size)
        self.second = nn.Linear(config.size, config.size) if self.gated else None
        self.act = Gated() if self.gated else torch.relu

    def forward(self, x):
        if self.gated:
            y = self.second(x)
        x = self.first(x)
        return self.act(x, y) if self.gated else self.act(x)
"""
    config = {"size": 4, "kind": "gated"}
    text = text.replace(
        "def forward(self, x, y):",
        "def __init__(self):\n        super().__init__()\n\n    def forward(self, x, y):",
    )
    state, _, forward = translate(text, config, specialised=True)
    assert " if " not in forward
    assert "self.gated" in [ast.unparse(item) for item in state.guards]
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    ours = _made("\n\n\n".join(map(_written, (*parts, state))), config)
    original = _made(text, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(6))
    assert torch.equal(ours(x), original(x))


PASSED_ON = """
def rounded(x, bits=8):
    most = 2 ** (bits - 1) - 1
    scale = most / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
    return (x * scale).round().clamp(-most - 1, most) / scale


class Coarse(nn.Linear):
    noisy = False

    def __init__(self, *args, bits=8, **kwargs):
        if bits != 8:
            raise ValueError("8 bits")
        super(Coarse, self).__init__(*args, **kwargs)
        self.known = None

    def forward(self, input, noisy=None):
        if noisy is None:
            noisy = self.noisy
        if self.training:
            weight = self.weight
        elif noisy:
            weight = self.weight + torch.rand_like(self.weight)
        elif self.known is None:
            self.known = rounded(self.weight)
            weight = self.known
        else:
            weight = self.known
        out = nn.functional.linear(rounded(input), weight)
        if not self.bias is None:
            out += self.bias.view(1, -1).expand_as(out)
        return out


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = Coarse(config.size, 2 * config.size, bias=config.bias, bits=8)
        self.second = Coarse(2 * config.size, out_features=3, bias=False)

    def forward(self, x):
        return self.second(self.first(x))
"""


@pytest.mark.parametrize("bias", [True, False])
def test_arguments_that_a_constructor_passes_on_get_their_names(
    bias: bool, translate: Translate
) -> None:
    config = {"size": 4, "bias": bias}
    state, init, _ = translate(PASSED_ON, config, specialised=True)
    (coarse,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Coarse"]
    assert coarse.init is not None
    assert coarse.init.parameters == ["in_features", "out_features", "bias"]
    functions = [_function(key, each) for key, each in state.translator.functions.items()]
    made = _written(coarse).replace("(nn.Module)", "(nn.Linear)")
    ours = _made("\n\n\n".join((*functions, made, _written(state))), config)
    original = _made(PASSED_ON, config).eval()
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(8))
    assert torch.equal(ours(x), original(x))


FIRST_VALUES = """
class Scale(nn.Module):
    def __init__(self, size, shift=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, size))
        self.register_parameter("shift", shift)
        self.bias = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan_in, _ = nn.init._calculate_fan_in_and_fan_out(self.weight)
            bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x):
        y = x @ self.weight + self.bias
        return y if self.shift is None else y + self.shift


class Watched(nn.Module):
    def forward(self, x):
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = Scale(config.size)
        self.seen = Watched()

    def forward(self, x):
        return self.seen(self.scale(x))
"""


def test_methods_that_give_first_values_are_not_translated(translate: Translate) -> None:
    state, _, forward = translate(FIRST_VALUES, {"size": 4}, specialised=True)
    (scale,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Scale"]
    assert "reset_parameters" not in _written(scale)
    assert "seen" not in forward
    ours, theirs = (
        _made(text, {"size": 4})
        for text in (f"{_written(scale)}\n\n\n{_written(state)}", FIRST_VALUES)
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(ours(x), theirs(x))


def test_a_method_that_sets_more_than_first_values_is(translate: Translate) -> None:
    text = FIRST_VALUES.replace(
        "        if self.bias is not None:\n",
        "        self.factor = 3.0\n        if self.bias is None:\n",
    ).replace("y = x @ self.weight", "y = self.factor * x @ self.weight")
    state, _, _ = translate(text, {"size": 4}, specialised=True)
    (scale,) = [each for cls, each in state.translator.states.items() if cls.__name__ == "Scale"]
    assert "3.0" in _written(scale)
