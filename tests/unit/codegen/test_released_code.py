"""What code has that laboratories and frameworks released from 2023 to 2026, in small modules."""

from __future__ import annotations

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from onboard.codegen.translate.output.printer import print_block
from tests.unit.codegen.conftest import Translate
from tests.unit.codegen.test_own_code import _made, _written

MAKERS = """
def without_memory(module_class, *args, **kwargs):
    place = kwargs.pop("device", "cpu")
    kwargs["device"] = "meta"
    return module_class(*args, **kwargs).to_empty(device=place)


def as_usual(module_class, *args, **kwargs):
    return module_class(*args, **kwargs)


maker = MAKER


def choose(memory):
    global maker
    maker = as_usual if memory else without_memory


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        global maker
        make = maker
        self.proj = make(nn.Linear, config.size, config.size, bias=False).requires_grad_(False)
        self.decay = nn.Parameter(torch.ones(config.size))
        self.decay._no_weight_decay = True

    def forward(self, x):
        return self.proj(x) * self.decay
"""


def test_a_global_function_that_a_constructor_only_reads_makes_its_layers(
    translate: Translate,
) -> None:
    for maker in ("without_memory", "as_usual"):
        text = MAKERS.replace("MAKER", maker)
        state, init, _ = translate(text, {"size": 4}, specialised=True)
        assert "self.proj = nn.Linear(config.size, config.size, bias=False)" in init
        assert "_no_weight_decay" not in init
        ours, x = _made(_written(state), {"size": 4}), torch.randn(2, 4)
        torch.testing.assert_close(ours(x), ours.proj(x) * ours.decay)


def test_a_norm_is_where_the_model_is_too(translate: Translate) -> None:
    text = MAKERS.replace("MAKER", "without_memory")
    text = text.replace(
        "nn.Linear, config.size, config.size, bias=False", "nn.LayerNorm, 4, eps=0.1"
    )
    _, init, _ = translate(text, {"size": 4}, specialised=True)
    assert "self.proj = LayerNorm(4, eps=0.1)" in init


KINDS = """
class Scaled(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.size))

    def forward(self, x, shift=None):
        return x * self.weight + shift


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

    def forward(self, x, y):
        return self.proj(x) + y


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.kind = config.kinds[index]
        if self.kind == "scaled":
            self.mixer = Scaled(config)
        elif self.kind == "dense":
            self.mixer = Dense(config)
        elif self.kind == "routed":
            self.mixer = Routed(config)
        else:
            raise ValueError(f"no such kind: {self.kind}")

    def forward(self, x):
        if self.kind == "scaled":
            return x + self.mixer(x, shift=1.0)
        elif self.kind == "dense":
            return x + self.mixer(x)
        elif self.kind == "routed":
            return x + self.mixer(x, x)
        else:
            raise ValueError(f"no such kind: {self.kind}")


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, i) for i in range(len(config.kinds))])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_a_kind_of_layers_that_the_config_has_nowhere_is_asserted_away(
    translate: Translate,
) -> None:
    config = {"size": 4, "kinds": ["scaled", "dense", "scaled"]}
    state, _, _ = translate(KINDS, config, specialised=True)
    own = {cls.__name__: each for cls, each in state.translator.states.items()}
    assert own.keys() == {"Scaled", "Dense", "Layer", "Toy"}
    assert "Routed" not in print_block(own["Layer"].init.body)  # type: ignore[union-attr]
    guards = "; ".join(print_block([item]) for item in own["Layer"].guards)  # type: ignore[list-item]
    assert "routed" in guards
    written = "\n\n\n".join(_written(own[name]) for name in ("Scaled", "Dense", "Layer"))
    ours, original = _made(f"{written}\n\n\n{_written(state)}", config), _made(KINDS, config)
    ours.load_state_dict(original.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(5))
    assert torch.equal(ours(x), original(x))


OWN_MASK = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def own_mask(x, window):
    places = torch.arange(x.shape[2])
    hidden = (places > places[:, None]) | (places <= places[:, None] - window)
    return torch.zeros(hidden.shape).masked_fill(hidden, -1e9)[None, None]


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.sliding_window = config.sliding_window
        if not config.use_sliding_window:
            self.sliding_window = None

    def forward(self, x):
        mask = own_mask(x, self.config.sliding_window)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, x, x, x, mask, scaling=0.5, sliding_window=self.sliding_window)[0]
"""


def test_attention_that_is_told_of_no_window_keeps_to_that_of_its_mask(
    translate: Translate,
) -> None:
    config = {"sliding_window": 3, "use_sliding_window": False, "_attn_implementation": "sdpa"}
    masks = {"own_mask": ["window"]}
    state, _, forward = translate(OWN_MASK, config, specialised=True, masks=masks)
    assert "sliding_window=self.config.sliding_window" in forward or (
        "self.config.sliding_window, None" in forward
    )
    assert "use_sliding_window" in "; ".join(print_block([item]) for item in state.guards)  # type: ignore[list-item]


SEARCH = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(config.size, config.size) for _ in range(config.layers)])
        self.first = 0
        for index, layer in enumerate(self.layers):
            if hasattr(layer, "bias") and layer.out_features == config.size:
                self.first = index
                break

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_what_a_loop_of_a_constructor_looks_for_is_left_out(translate: Translate) -> None:
    config = {"size": 4, "layers": 2}
    state, init, forward = translate(SEARCH, config, specialised=True)
    assert "first" not in init + forward
    ours, x = _made(_written(state), config), torch.randn(2, 4)
    torch.testing.assert_close(ours(x), ours.layers[1](ours.layers[0](x)))


def test_what_it_looks_for_is_not_read(translate: Translate) -> None:
    read = SEARCH.replace("return x", "return x + self.first")
    with pytest.raises(Untranslatable, match=r"self.first, which a loop at .* looks for"):
        translate(read, {"size": 4, "layers": 2}, specialised=True)


def test_a_loop_that_does_more_is_written(translate: Translate) -> None:
    config = {"size": 4, "layers": 2}
    text = SEARCH.replace("self.first = index", "self.layers.append(layer)")
    state, _, _ = translate(text, config, specialised=True)
    ours, theirs = _made(_written(state), config), _made(text, config)
    assert len(ours.layers) == 3
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(ours(x), theirs(x))


COLLECTED = """
class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)
        self.index = index

    def forward(self, x):
        rates = self.inner(x).sigmoid() if self.index % 2 else None
        return x + self.inner(x).tanh(), rates


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList([Block(config, index) for index in range(config.layers)])

    def forward(self, x):
        every = () if self.config.output_router_logits else None
        for block in self.blocks:
            x, rates = block(x)
            if rates is not None:
                every += (rates,)
        return x
"""


@pytest.mark.parametrize("added", ["every += (rates,)", "every = every + (rates,)"])
def test_what_code_collects_unasked_is_not_collected(added: str, translate: Translate) -> None:
    text = COLLECTED.replace("every += (rates,)", added)
    config = {"size": 8, "layers": 3, "output_router_logits": True}
    state, _, forward = translate(text, config, specialised=True)
    assert "every" not in forward
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    ours = _made("\n\n\n".join([*map(_written, parts), _written(state)]), config)
    theirs = _made(text, config)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x))


def test_what_reads_it_all_the_same_has_no_translation(translate: Translate) -> None:
    text = COLLECTED.replace("        return x\n", "        return x * len(every)\n")
    config = {"size": 8, "layers": 3, "output_router_logits": True}
    with pytest.raises(Untranslatable, match="nobody asks for"):
        translate(text, config, specialised=True)


HANDED = """
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.size, config.size)

    def mixed(self, earlier, x):
        every = torch.stack(earlier + [x], dim=2)
        return (every.softmax(dim=2) * every).sum(dim=2)

    def forward(self, x, earlier):
        mixed = self.mixed(earlier, x)
        earlier.append(x)
        return self.inner(mixed).tanh(), earlier


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])

    def forward(self, x):
        earlier = []
        for block in self.blocks:
            x, earlier = block(x, earlier)
        return x
"""


def test_a_list_that_layers_hand_on_stays_a_list(translate: Translate) -> None:
    config = {"size": 8, "layers": 3}
    state, _, forward = translate(HANDED, config, specialised=True)
    assert "earlier = []" in forward
    parts = [each for cls, each in state.translator.states.items() if cls.__name__ != "Toy"]
    ours = _made("\n\n\n".join([*map(_written, parts), _written(state)]), config)
    theirs = _made(HANDED, config)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x))
