"""Constructs of modeling code, each in a small module: what the translator makes of them."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable

import pytest

from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code, Mask, PaddingMask
from onboard.codegen.translate.mechanisms.masks import padding
from onboard.codegen.translate.output.printer import print_block

Translate = Callable[..., tuple[ClassState, str, str]]
PARTS = """
class First(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, other=None):
        return self.proj(x)


class Second(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size, bias=index > 0)

    def forward(self, x, other=None):
        return x if other is None else self.proj(x) + other


"""


def test_a_table_of_classes_becomes_a_choice(translate: Translate) -> None:
    state, init, _ = translate(
        PARTS
        + """
KINDS = {"first": First, "second": Second}


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        layers = []
        for i in range(config.layers):
            kind = KINDS[config.kinds[i]]
            layers.append(kind(config, index=i))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
""",
        {"size": 4, "layers": 2, "kinds": ["first", "second"]},
    )
    assert init == (
        "super().__init__()\n"
        "self.layers = nn.ModuleList([First(config=config) if config.kinds[i] == 'first' "
        "else Second(config=config, index=i) for i in range(config.layers)])"
    )
    assert {cls.__name__ for cls in state.translator.states} == {"Toy", "First", "Second"}


def test_a_loop_that_appends_modules_stays_a_loop(translate: Translate) -> None:
    _, init, forward = translate(
        PARTS
        + """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        layers = []
        self._tied_weights_keys = None
        for i, kind in enumerate(config.kinds):
            module = First(config, i)
            if kind == "first":
                layers.append(module)
                if self._tied_weights_keys is None:
                    self._tied_weights_keys = {"a": "b"}
            else:
                layers.append(Second(config, i))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        first = x
        for layer in self.layers:
            x = layer(x, first)
        return x
""",
        {"size": 4, "kinds": ["first", "second"]},
    )
    assert init.splitlines()[1:] == [
        "layers = []",
        "for i, kind in enumerate(config.kinds):",
        "    if kind == 'first':",
        "        layers.append(First(config=config))",
        "    else:",
        "        layers.append(Second(config=config, index=i))",
        "self.layers = nn.ModuleList(layers)",
    ]
    assert "x = layer(x, first)" in forward


def test_modules_handed_to_a_constructor_keep_their_class(translate: Translate) -> None:
    state, init, forward = translate(
        PARTS
        + """
class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x):
        return self.second(self.first(x), other=x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.pair = Pair(First(config, 0), Second(config, 1))

    def forward(self, x):
        return self.pair(x)
""",
        {"size": 4},
    )
    assert (
        init.splitlines()[1]
        == "self.pair = Pair(first=First(config=config), second=Second(config=config))"
    )
    (pair,) = [item for cls, item in state.translator.states.items() if cls.__name__ == "Pair"]
    assert pair.methods["forward"].parameters == ["x"]
    assert forward == "return self.pair(x)"


def test_a_config_that_code_changes_is_copied(translate: Translate) -> None:
    _, init, forward = translate(
        "import copy\n"
        + PARTS
        + """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList()
        for size in config.sizes:
            own = copy.deepcopy(config)
            own.size = size
            self.layers.append(First(own, 0))

    def forward(self, x):
        parts = {layer.proj.bias.shape[0]: layer(x) for layer in self.layers}
        return parts
""",
        {"size": 4, "sizes": [2, 4]},
    )
    assert init.splitlines()[2:] == [
        "for size in config.sizes:",
        "    own = copy.deepcopy(config)",
        "    own.size = size",
        "    self.layers.append(First(config=own))",
    ]
    assert forward == "return {layer.proj.bias.shape[0]: layer(x) for layer in self.layers}"


def test_a_dict_of_masks_is_as_good_as_a_mask(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.kinds = config.kinds

    def forward(self, x, mask=None):
        makers = {"a": lambda: mask, "b": lambda: mask}
        masks = {kind: makers[kind]() for kind in set(self.kinds)}
        if masks.get("a") is not None:
            x = x + 1
        return x
""",
        {"kinds": ["a", "b"]},
        mask=PaddingMask(),
    )
    assert forward == "return x"


@pytest.mark.parametrize("specialised", [False, True])
@pytest.mark.parametrize(
    "chosen",
    ["own = mask if layer.full else None", "own = None\n            if layer.full: own = mask"],
)
def test_layers_may_get_no_mask_and_others_one(
    translate: Translate, chosen: str, specialised: bool
) -> None:
    _, _, forward = translate(
        f"""
class Layer(nn.Module):
    def __init__(self, full):
        super().__init__()
        self.full = full

    def forward(self, x, mask=None):
        if mask is not None and mask.shape[1] > 1:
            x = x + mask
        return x * 2

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(index in config.fulls) for index in range(2)])

    def forward(self, x, mask=None):
        for layer in self.layers:
            {chosen}
            x = layer(x, own)
        return x
""",
        {"fulls": [1]},
        specialised=specialised,
        mask=Mask(whole=True),
    )
    assert forward == "for layer in self.layers:\n    x = layer(x)\nreturn x"


@pytest.mark.parametrize("count", [0, 1])
def test_a_mask_that_some_layers_get_is_added_where_the_small_model_adds_it(
    translate: Translate, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:

    class Counted(dict[tuple[str, int], int]):
        def __missing__(self, key: tuple[str, int]) -> int:
            return 1 if "if own" in linecache.getline(*key) else count

    monkeypatch.setattr(padding, "lines_run", lambda *_: Counted())
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x, mask=None):
        own = mask if x.shape[0] > 1 else None
        if own is not None:
            x = x + own
        return x.softmax(-1)
""",
        mask=Mask(),
        specialised=True,
    )
    assert ("masked_fill" in forward) == bool(count)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize(
    "asked", ["own.shape[-2] != x.shape[-2]", "own is not None and own.size(-1) == x.size(1)"]
)
def test_sizes_of_a_mask_are_compared_as_the_small_model_compares_them(
    translate: Translate, monkeypatch: pytest.MonkeyPatch, count: int, asked: str
) -> None:
    class Counted(dict[tuple[str, int], int]):
        def __missing__(self, key: tuple[str, int]) -> int:
            return 1 if "if own" in linecache.getline(*key) else count

    monkeypatch.setattr(padding, "lines_run", lambda *_: Counted())
    text = f"""
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x, own=None):
        if {asked}:
            x = x * 3
        return (x + own).softmax(-1)
"""
    _, _, forward = translate(text, own=Mask(whole=True), specialised=True)
    assert ("x * 3" in forward) == bool(count)
    assert "own" not in forward
    with pytest.raises(Untranslatable):  # a text may be as long as a number says, or not
        translate(text.replace("x.s", "4 + 0 * x.s"), own=Mask(whole=True), specialised=True)


def test_what_a_model_is_given_stays_as_it_is(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.offset = 2

    def forward(self, x, position_ids):
        position_ids += self.offset
        x += 1
        return x * position_ids
""",
        position_ids=Code(name("position_ids")),
    )
    assert "position_ids +=" not in forward
    assert "x += 1" in forward


@pytest.mark.parametrize("tensor", ["nn.Parameter(torch.ones(3), requires_grad=False)"])
def test_a_buffer_is_no_parameter(translate: Translate, tensor: str) -> None:
    _, init, _ = translate(
        f"""
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.register_buffer("ones", {tensor}, persistent=False)

    def forward(self, x):
        return x * self.ones
""",
        specialised=True,
    )
    assert "Parameter" not in init
    assert "torch.ones(3)" in init


def test_a_module_may_be_an_identity_in_some_configs(translate: Translate) -> None:
    _, init, forward = translate(
        PARTS
        + """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.more:
            self.maybe = First(config, 0)
        else:
            self.maybe = nn.Identity()

    def forward(self, x):
        return self.maybe(x)
""",
        {"size": 4, "more": True},
    )
    assert init.endswith("else:\n    self.maybe = nn.Identity()")
    assert forward == "return self.maybe(x)"


@pytest.mark.parametrize("number", [3, 0])
def test_a_class_that_no_layer_of_this_config_has_is_left_out_and_guarded(
    translate: Translate, number: int
) -> None:
    state, init, forward = translate(
        PARTS
        + """
class Toy(nn.Module):
    def __init__(self, config, number=3):
        super().__init__()
        self.number = number
        self.used = First(config, 0)
        self.other = Second(config, 1) if number in config.numbers else None

    def forward(self, x):
        if self.other is not None:
            x = self.other(x)
        return self.used(x)
""",
        {"size": 4, "numbers": [number]},
    )
    if number == 3:  # the class is there
        assert "Second" in init
        assert "self.other" in forward
    else:
        assert "Second" not in init
        assert forward == "return self.used(x)"
        assert [ast.unparse(guard) for guard in state.guards] == ["not 3 in config.numbers"]


def test_modules_that_nothing_runs_keep_their_weights(translate: Translate) -> None:
    state, init, _ = translate(
        PARTS
        + """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.used = First(config, 0)
        self.unused = Second(config, 1)

    def forward(self, x):
        return self.used(x)
""",
        {"size": 4},
    )
    assert init.endswith("self.unused = Second(config=config)")
    assert state.weights_only == ["unused"]


def test_a_method_of_a_submodule_is_called_there(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Part(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def twice(self, x):
        return self.proj(self.proj(x))


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = Part(config)

    def twice(self, x):
        return x * 2

    def forward(self, x):
        return self.part.twice(x)
"""
    )
    assert forward == "return self.part.twice(x)"


def test_what_may_be_none_is_asked_for(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        before = None
        for layer in self.layers:
            y = layer(x)
            if before is not None:
                y = y + before
            before = y
        return before
"""
    )
    assert "if before is not None:" in forward


def test_an_item_of_none_is_refused(translate: Translate) -> None:
    with pytest.raises(Untranslatable, match="an item of None"):
        translate(
            """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x, past=None):
        return past[0] + x
"""
        )


def test_layers_that_a_number_skips_keep_their_weights_and_are_not_run(
    translate: Translate,
) -> None:
    state, _, forward = translate(
        PARTS
        + """
class Third(Second):
    def forward(self, x, other):
        raise NotImplementedError


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.skipped = config.skipped
        layers = []
        for i in range(config.layers):
            if i in self.skipped:
                layers.append(Third(config, i))
            else:
                layers.append(First(config, i))
        self.layers = nn.ModuleList(layers)

    def forward(self, x, other=None):
        for index, layer in enumerate(self.layers):
            is_skipped = index in self.skipped
            if is_skipped and other is None:
                continue
            x = layer(x, other)
        return x
""",
        {"size": 4, "layers": 3, "skipped": [1]},
    )
    assert "if not is_skipped:\n        x = layer(x)" in forward
    third = next(item for cls, item in state.translator.states.items() if cls.__name__ == "Third")
    assert third.weights_only == ["proj"]
    assert third.methods == {}


def test_what_follows_a_continue_is_under_the_opposite_test(translate: Translate) -> None:
    _, _, forward = translate(
        PARTS
        + """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.part = First(config, 0)
        self.odd = config.odd

    def forward(self, x):
        for index in range(4):
            if index == self.odd:
                x = x + 1
            else:
                x = x + 2
                continue
            x = self.part(x)
        return x
""",
        {"size": 4, "odd": 1},
    )
    assert forward == (
        "for index in range(4):\n"
        "    if index == self.odd:\n"
        "        x = x + 1\n"
        "        x = self.part(x)\n"
        "    else:\n"
        "        x = x + 2\n"
        "return x"
    )


def test_equal_modules_in_a_list_of_known_length_stay_a_comprehension(translate: Translate) -> None:
    _, init, forward = translate(
        PARTS
        + """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([First(config, 0) for _ in [0, 1]])
        self.others = nn.ModuleList([First(config, i) for i in range(config.count)])
        self.config = config

    def forward(self, x):
        for layer in self.others[: self.config.count]:
            x = layer(x)
        return self.layers[0](x)
""",
        {"size": 4, "count": 2},
    )
    assert "nn.ModuleList([First(config=config) for _ in range(2)])" in init
    assert "for layer in self.others:" in forward


@pytest.mark.parametrize("kept", ["number", "number + 1"])
def test_a_layer_is_asked_for_its_number_where_it_keeps_it_as_it_is(
    translate: Translate, kept: str
) -> None:
    text = f"""
class Layer(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.number = {kept}
        self.used = First(config, 0)
        self.other = Second(config, 1) if number in config.numbers else None

    def forward(self, x):
        if self.other is not None:
            x = self.other(x)
        return self.used(x)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, i) for i in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
    state, _, _ = translate(PARTS + text, {"size": 4, "numbers": [5]})
    (layer,) = (found for cls, found in state.translator.states.items() if cls.__name__ == "Layer")
    forward = print_block(layer.methods["forward"].body)
    if kept == "number":
        assert [ast.unparse(guard) for guard in layer.guards] == ["not number in config.numbers"]
        assert forward == "return self.used(x)"
    else:
        assert layer.guards == []
        assert "self.other" in forward


@pytest.mark.parametrize("test", ["self.config.most < x.shape[1]", "self.config.most > x.shape[1]"])
def test_a_side_for_long_texts_alone_is_left_out_and_asserted(
    translate: Translate, test: str
) -> None:
    text = f"""
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.used = First(config, 0)

    def forward(self, x):
        if not self.training and {test}:
            offset = 0
            while offset < x.shape[1]:
                x[:, offset] = self.used(x[:, offset])
                offset += 1
        else:
            x = self.used(x)
        return x
"""
    if ">" in test:  # most texts would be on the side that has no translation
        with pytest.raises(Untranslatable):
            translate(PARTS + text, {"size": 4, "most": 99})
    else:
        _, _, forward = translate(PARTS + text, {"size": 4, "most": 99})
        assert forward.split("\n") == [
            "assert x.shape[1] <= self.config.most, 'not covered: texts of more tokens at a time'",
            "return self.used(x)",
        ]


@pytest.mark.parametrize("made", ["nn.Parameter(torch.zeros(4))", "nn.Linear(4, 4)"])
def test_an_attribute_that_may_be_none_is_asked_for(translate: Translate, made: str) -> None:
    _, _, forward = translate(
        f"""
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        if config.biased:
            self.bias = {made}
        else:
            self.bias = None

    def forward(self, x):
        if self.bias is not None:
            x = x + 1
        return x
""",
        {"biased": False},
    )
    assert forward.split("\n") == ["if self.bias is not None:", "    x = x + 1", "return x"]
