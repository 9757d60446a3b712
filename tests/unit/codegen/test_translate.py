"""The translator on small modules written here: what goes, what stays, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.state import ClassState
from onboard.codegen.translate.language.trees.syntax import Untranslatable, name
from onboard.codegen.translate.language.values import Code, Known, Mask
from onboard.codegen.translate.output.printer import print_block

Translate = Callable[..., tuple[ClassState, str, str]]


def test_what_is_known_is_decided_and_what_is_dead_goes(translate: Translate) -> None:
    state, init, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.gradient_checkpointing = False
        self.dropout = nn.Dropout(0.1)
        self.proj = nn.Linear(self.hidden_size, self.hidden_size)

    def forward(self, x, mask=None, past=None, use_cache=False, **kwargs):
        if (x is None) ^ (past is not None):
            raise ValueError("one of both")
        flash = kwargs.pop("flash", None)
        if flash is not None and self.training:
            x = x + 1
        elif self.gradient_checkpointing:
            x = x + 2
        else:
            y = nn.functional.dropout(self.dropout(self.proj(x)), p=0.1, training=self.training)
        unused = x * 3
        return y, past if use_cache else None
""",
        {"hidden_size": 4},
    )
    assert (
        init == "super().__init__()\nself.proj = nn.Linear(config.hidden_size, config.hidden_size)"
    )
    assert forward == "return self.proj(x)"
    assert state.methods["forward"].parameters == ["x"]


def test_a_new_cache_is_none(translate: Translate) -> None:
    _, _, forward = translate(
        """
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, cache=None):
        if cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if cache is not None:
            x = cache.update(x, x, 0)[0]
        return x + 1
"""
    )
    assert forward == "return x + 1"


def test_a_branch_on_the_config_keeps_both_sides(translate: Translate) -> None:
    _, init, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.cap = config.cap

    def forward(self, x):
        if self.cap is not None:
            x = torch.tanh(x / self.cap)
        return x
""",
        {"cap": None},
    )
    assert init == "super().__init__()\nself.cap = config.cap"
    assert forward == "if self.cap is not None:\n    x = torch.tanh(x / self.cap)\nreturn x"


UNTRANSLATABLE_SIDE = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.odd = config.odd

    def forward(self, x):
        if self.odd:
            x = list(map(lambda item: item, x))
        return x
"""


def test_a_side_without_translation_is_guarded_against(translate: Translate) -> None:
    state, _, forward = translate(UNTRANSLATABLE_SIDE, {"odd": False})
    assert forward == "return x"
    assert [type(guard).__name__ for guard in state.guards] == ["UnaryOp"]


def test_a_side_without_translation_that_this_config_takes_is_refused(translate: Translate) -> None:
    with pytest.raises(Untranslatable, match="<lambda>"):
        translate(UNTRANSLATABLE_SIDE, {"odd": True})


LAYERS_OF_TWO_KINDS = """
class One(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x):
        return self.proj(x)


class Two(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, scale):
        return self.proj(x) * scale, None


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.kind = config.kinds[index]
        self.mixer = One(config) if self.kind == "one" else Two(config)
        self.extra = None if self.kind == "one" else One(config)

    def forward(self, x, scale):
        if self.kind == "one":
            x = self.mixer(x)
        else:
            x, _ = self.mixer(x, scale)
            x = self.extra(x)
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, index) for index in range(len(config.kinds))])

    def forward(self, x, scale):
        for layer in self.layers:
            x = layer(x, scale)
        return x
"""


def test_a_branch_for_one_kind_of_layer_has_that_kinds_modules_alone(translate: Translate) -> None:
    state, _, _ = translate(
        LAYERS_OF_TWO_KINDS, {"size": 4, "kinds": ["one", "two"]}, scale=Code(name("scale"))
    )
    (layer,) = [item for item in state.translator.states.values() if item.cls.__name__ == "Layer"]
    assert print_block(layer.methods["forward"].body) == (
        "if self.kind == 'one':\n"
        "    x = self.mixer(x)\n"
        "else:\n"
        "    x = self.mixer(x, scale)\n"
        "    x = self.extra(x)\n"
        "return x"
    )


KEYS_FOR_LATER_LAYERS = """
from transformers.cache_utils import KVSharingDict


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.kind = config.kinds[index]
        self.keeps = config.keeps[index]
        self.proj = nn.Linear(config.size, config.size)

    def forward(self, x, shared=None, cache=None):
        if self.keeps:
            keys = self.proj(x)
            shared[self.kind] = keys, x
        else:
            keys, x = shared[self.kind]
        if cache is not None:
            keys = cache.update(keys)
        return x + keys


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, index) for index in range(len(config.kinds))])

    def forward(self, x, **kwargs):
        shared = kwargs.pop("shared", None)
        if not isinstance(shared, KVSharingDict):
            shared = KVSharingDict(shared)
        for layer in self.layers:
            x = layer(x, shared=shared)
        return x
"""


def test_layers_leave_keys_and_values_for_later_layers_in_a_dict(translate: Translate) -> None:
    config = {"size": 4, "kinds": ["a", "a"], "keeps": [True, False]}
    state, _, forward = translate(KEYS_FOR_LATER_LAYERS, config)
    assert forward == "shared = {}\nfor layer in self.layers:\n    x = layer(x, shared)\nreturn x"
    (layer,) = [item for item in state.translator.states.values() if item.cls.__name__ == "Layer"]
    body = print_block(layer.methods["forward"].body)
    assert "shared[self.kind] = (keys, x)" in body
    assert "keys, x = shared[self.kind]" in body
    assert "cache" not in body


def test_a_method_that_gives_back_its_arguments_whichever_way_it_goes_leaves_no_call(
    translate: Translate,
) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def cut(self, x, tables, options, keep):
        cut = True
        if x.shape[1] == 1:
            cut = False
        if not cut:
            return x, tables, options
        kept = slice(-keep, None)
        x = x[:, kept, :]
        tables = {key: (cos[:, kept, :], sin[:, kept, :]) for key, (cos, sin) in tables.items()}
        options = {key: value if value is not None else None for key, value in options.items()}
        return x, tables, options

    def forward(self, x, tables):
        x, tables, options = self.cut(x, tables, {"a": None, "b": True}, 0)
        return x + 1 if options["b"] else x, tables
""",
        tables=Code(name("tables")),
    )
    assert forward == "return x + 1, tables"


@pytest.mark.parametrize("change", ["x = x * 2", "x += 1", "x[0] = 0", "x.mul_(2)"])
def test_a_method_that_changes_an_argument_is_called(translate: Translate, change: str) -> None:
    _, _, forward = translate(
        f"""
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def change(self, x):
        if x.shape[1] == 1:
            {change}
            return x
        return x

    def forward(self, x):
        return self.change(x)
"""
    )
    assert forward == "return self.change(x)"


def test_known_values_that_differ_between_branches_become_variables(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wide = config.wide

    def forward(self, x):
        factor = 1
        if self.wide:
            factor = 2
        return x * factor
""",
        {"wide": True},
    )
    assert forward == "if self.wide:\n    factor = 2\nelse:\n    factor = 1\nreturn x * factor"


def test_transposition_of_heads_is_put_off_and_cancels(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        y = x.view(2, 3, 4, 5).transpose(1, 2)
        y = y.float() * 2
        a, b = y.chunk(2, dim=-1)
        return a.transpose(1, 2) + 1, b.sum(0)
"""
    )
    assert forward == (
        "y = x.view(2, 3, 4, 5)\ny = y.float() * 2\na, b = y.chunk(2, dim=-1)\nreturn a + 1, b.transpose(1, 2).sum(0)"
    )


def test_a_dict_with_computed_keys_exists_at_run_time(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        tables = {}
        for kind in set(self.config.kinds):
            tables[kind] = x + 1
        return tables["a"]
""",
        {"kinds": ["a", "b"]},
    )
    assert forward == (
        "tables = {}\nfor kind in sorted(set(self.config.kinds)):\n    tables[kind] = x + 1\nreturn tables['a']"
    )


TREE = """
class Inner(nn.Module):
    def __init__(self, config, index, cross=False):
        super().__init__()
        self.index = index
        self.cross = cross
        self.size = 2 * config.size
        self.scale = config.size ** -0.5
        self.proj = nn.Linear(self.size, config.size)

    def forward(self, states, mask, past=None, **kwargs):
        if self.cross:
            states = states + past
        return self.proj(states) * self.scale, None


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Inner(config, i) for i in range(config.depth)])
        if config.extra:
            self.extra = Inner(config, 0, cross=True)

    def forward(self, x, mask=None, **kwargs):
        for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            x, _ = layer(x, mask, past=None, flag=True, **kwargs)
        out = BaseModelOutputWithPast(last_hidden_state=x, past_key_values=None)
        return out.last_hidden_state
"""


def test_arguments_that_are_not_needed_go_at_every_level(translate: Translate) -> None:
    state, init, forward = translate(TREE, {"size": 4, "depth": 2, "extra": False}, mask=Mask())
    assert init == (
        "super().__init__()\nself.layers = nn.ModuleList([Inner(config=config) for _ in range(config.depth)])"
    )
    assert forward == "for layer in self.layers:\n    x = layer(x)\nreturn x"
    inner = next(item for item in state.translator.states.values() if item.cls.__name__ == "Inner")
    assert inner.init is not None
    assert inner.init.parameters == ["config"]
    assert print_block(inner.init.body) == (
        "super().__init__()\nsize = 2 * config.size\nself.scale = config.size ** -0.5\n"
        "self.proj = nn.Linear(size, config.size)"
    )


def test_a_mask_that_is_read_is_not_lost_in_silence(translate: Translate) -> None:
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x, mask=None):
        if mask is not None:
            x = x * mask
        return x
"""
    with pytest.raises(Untranslatable, match="attention that reads its mask"):
        translate(text, mask=Mask())
    assert translate(text, mask=Known(None))[2] == "return x"


def test_helpers_become_functions_or_expressions(translate: Translate) -> None:
    state, _, forward = translate(
        """
def keep(x, last=0):
    if isinstance(last, int):
        last = slice(-last, None)
    return x[:, last, :]


def cube(x, times=1):
    y = x * x
    for _ in range(3):
        y = y * x
    return y


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        return cube(keep(x, 0), times=2)
"""
    )
    assert forward == "return cube(x)"
    routine = state.translator.functions["cube"]
    assert print_block(routine.body) == "y = x * x\nfor _ in range(3):\n    y = y * x\nreturn y"
    assert routine.parameters == ["x"]


def test_translated_code_computes_the_same(translate: Translate) -> None:
    """A residual body, run with the original's attributes, gives the original's values."""
    text = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scale = config.size ** -0.5
        self.first, self.second = config.size, 3

    def forward(self, x, cache=None):
        a, b = x, x + 1
        a, b = b, a
        pair = (a, b)
        a = a * self.scale
        kept = {"a": pair[0], "b": b}
        b += 2  # in place: kept["b"] is the same tensor
        return kept["a"] + a - kept["b"] * b ** -2 if cache is None else x
"""
    state, _, forward = translate(text, {"size": 4})
    torch.manual_seed(5)
    x = torch.rand(3, 4) + 1
    scope: dict[str, Any] = {"torch": torch}
    body = "\n".join(f"    {line}" for line in forward.splitlines())
    exec(f"def forward(self, x):\n{body}", scope)
    original = state.cls(SimpleNamespace(size=4))
    torch.testing.assert_close(scope["forward"](original, x.clone()), original(x.clone()))


def test_scores_plus_the_mask_are_made_causal_where_they_are(translate: Translate) -> None:
    _, _, forward = translate(
        """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.keys = config.keys

    def forward(self, x, mask):
        x = x.relu()
        if mask.dtype == torch.bool:
            x = x.masked_fill(~mask, float("-inf"))
        else:
            x = x + mask[:, 0, :, :]
        return x.topk(min(self.keys, x.shape[-1]), dim=-1).indices
""",
        {"keys": 4},
        mask=Mask(),
    )
    assert (
        "x = x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), float('-inf'))" in forward
    )
    assert "torch.sym_min(self.keys, x.shape[-1])" in forward
    assert "mask[" not in forward


def test_an_item_of_a_filled_dict_may_be_none(translate: Translate) -> None:
    state, _, forward = translate(
        """
class Inner(nn.Module):
    def forward(self, x, scale=None):
        if scale is not None:
            x = x * scale
        return x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([Inner() for _ in range(2)])

    def forward(self, x):
        scales = {}
        for kind in set(self.config.kinds):
            if self.config.plain[kind]:
                scales[kind] = None
            else:
                scales[kind] = x.exp()
        for i, layer in enumerate(self.layers):
            x = layer(x, scales[self.config.kinds[i]])
        return x
""",
        {"kinds": ["a", "b"], "plain": {"a": True, "b": False}},
    )
    inner = next(item for item in state.translator.states.values() if item.cls.__name__ == "Inner")
    assert (
        print_block(inner.methods["forward"].body)
        == "if scale is not None:\n    x = x * scale\nreturn x"
    )
    assert "x = layer(x, scales[self.config.kinds[i]])" in forward
