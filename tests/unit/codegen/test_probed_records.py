"""Objects of settings that constructors make of the config's fields by their names, and methods of
constructors that leave nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onboard.codegen.translate.language.trees.syntax import Untranslatable
from tests.unit.codegen.test_held_values import _same, _state
from tests.unit.codegen.test_own_code import HEAD, _made, _written

Translate = Callable[..., tuple[Any, str, str]]

SETTINGS = """
from transformers import PretrainedConfig


class Settings:
    def __init__(self, size=8, heads=2, wide=None, odd=3, kind="pre", more=0, **kwargs):
        if size % heads:
            raise ValueError("size")
        assert kind in ("pre", "post")
        self.size = size
        self.heads = heads
        self.wide = wide if wide is not None else 4 * size
        self._per_head = size // heads
        self.odd = odd
        self.kind = kind
        self.more = more
        self.both = size + heads

    @property
    def per_head(self):
        return self._per_head


class Config(PretrainedConfig):
    def __init__(self, size=8, heads=2, kind="pre", wide=None, **kwargs):
        self.size, self.heads, self.kind, self.wide = size, heads, kind, wide
        super().__init__(**kwargs)

    def settings(self):
        known = set(Settings.__init__.__code__.co_varnames)
        given = {key: value for key, value in self.to_dict().items() if key in known}
        for key in ("more",):
            if key not in given and hasattr(self, key):
                given[key] = getattr(self, key)
        return Settings(**given)


class Inner(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.lin = nn.Linear(settings.size, settings.wide)
        self.out = nn.Linear(settings.wide, settings.size)
        self.per_head = settings.per_head
        self.after = settings.kind == "post"
        self.more = settings.more

    def forward(self, x):
        x = self.out(self.lin(x).tanh()) / self.per_head + self.more
        return x * 2 if self.after else x


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = Inner(MADE)

    def forward(self, x):
        return self.inner(x)
"""
_BY_NAMES = "Settings(**{k: v for k, v in vars(config).items() if k in Settings.__init__.__code__.co_varnames})"

SAYS = """
class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lin = nn.Linear(config.size, config.size)
        self.cached = None
        self._report()

    def _report(self):
        try:
            first = 1
            count = first + self.no_such
        except AttributeError:
            import warnings
            for part in (1, 2):
                count = part
        print(f"{count} of {self.lin}")

    def _check(self, x):
        if getattr("config", "scaled", False) and self.scales == 3:
            return
        KEEPS

    def forward(self, x):
        self._check(x)
        return self.lin(x)
"""


@pytest.mark.parametrize("made", ["config.settings()", _BY_NAMES])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_settings_are_the_fields_that_they_change_with(
    translate: Translate, made: str, kind: str
) -> None:
    text = SETTINGS.replace("MADE", made)
    config = {"size": 4, "heads": 2, "kind": kind}
    state, _, _ = translate(text, config, specialised=True)
    inner = _state(state, "Inner")
    written = _written(inner)
    assert "settings.size * 4" in written
    assert "settings.size // settings.heads" in written
    guards = [ast.unparse(item) for item in state.guards]
    assert f"getattr(config, 'kind', '{kind}') == '{kind}'" in guards
    assert "getattr(config, 'more', 0) == 0" in guards
    assert "getattr(config, 'wide', None) is None" in guards
    names: dict[str, Any] = {}
    exec(HEAD + text, names)
    given = names["Config"](**config)
    theirs, ours = names["Toy"](given), _made(f"{written}\n\n\n{_written(state)}", vars(given))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(ours(x), theirs(x))


def test_a_setting_that_follows_from_no_field_is_refused_where_it_is_read(
    translate: Translate,
) -> None:
    text = SETTINGS.replace("MADE", "config.settings()").replace(
        "settings.per_head", "settings.both"
    )
    with pytest.raises(Untranslatable, match="both of a record, which is none of its fields"):
        translate(text, {"size": 4, "heads": 2}, specialised=True)


def test_what_a_constructor_says_is_left_out(translate: Translate) -> None:
    text, config = SAYS.replace("KEEPS", "y = x"), {"size": 4}
    state, init, _ = translate(text, config, specialised=True)
    assert "print" not in init
    _same(state, text, config)
    assert _made(text, config).cached is None


def test_what_a_method_keeps_that_says_something_is_kept(translate: Translate) -> None:
    """What it tries fails in its second statement, and the other side counts to two."""
    text = SAYS.replace("        print(", "        self.cached = count\n        print(")
    text = text.replace("KEEPS", "y = x").replace("self.lin(x)", "self.lin(x) * self.cached")
    state, _, _ = translate(text, {"size": 4}, specialised=True)
    _same(state, text, {"size": 4})
    assert _made(text, {"size": 4}).cached == 2
