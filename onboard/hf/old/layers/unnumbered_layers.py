"""Layers and attention of transformers as they were before they asked for the layer's number, and before
4.48, whose constructors left sizes and a rotary embedding: for classes that inherit from them so.

A class that reads what its base left, or gives no number, has such a base; others have what
transformers has.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

from onboard.hf.old.gone import Gone
from onboard.hf.old.layers.laid_bases import as_before, calls_of_base, lay_under
from onboard.hf.old.rotary_forms import SizedRotaryEmbedding
from onboard.hf.parsed_code import parsed_code

_NUMBER = "layer_idx"
_ROTARY = "rotary_emb"
_LEFT = {
    "hidden_size",
    "num_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rope_theta",
    _ROTARY,
}
"""What constructors of attention left."""
_PLAIN = "default"


class _Unnumbered(nn.Module):
    """Laid over a class of layers that asks for a number: that of the first, as all were alike."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, 0 if layer_idx is None else layer_idx)


class _Sized(_Unnumbered):
    """Laid over a class of attention: its sizes are attributes."""

    def __init__(self: Any, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_position_embeddings = config.max_position_embeddings
        self.rope_theta = config.rope_theta


class _Rotating(_Sized):
    """Laid over a class of attention: it has a plain rotary embedding of its own, too."""

    def __init__(self: Any, config: Any, layer_idx: int | None = None) -> None:
        scaling = getattr(config, "rope_scaling", None) or {}
        if scaling.get("rope_type", scaling.get("type", _PLAIN)) != _PLAIN:
            Gone("transformers' attention with RoPE that is scaled", "Use plain RoPE").refuse()
        super().__init__(config, layer_idx)
        self.rotary_emb = SizedRotaryEmbedding(
            self.head_dim, config.max_position_embeddings, config.rope_theta
        )


def give_layer_numbers(package: str) -> list[str]:
    """Have the classes of a package inherit from layers and attention that are made as they make them,
    and its modules call such; return what was given.
    """
    modules = [module for key, module in sys.modules.items() if key.startswith(f"{package}.")]
    return [
        fact for module in modules for fact in (*_give(module), *lay_under(module, _asks, _form))
    ]


def _give(module: ModuleType) -> Iterator[str]:
    """Put layers that need no number in the place of those that a module makes without one."""
    if getattr(module, "__file__", None) is None:
        return
    calls = [x for x in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(x, ast.Call)]
    for name, cls in list(vars(module).items()):
        own = [x for x in calls if isinstance(x.func, ast.Name) and x.func.id == name]
        if own and _asks(cls) and any(map(_is_of_a_config, own)):
            setattr(module, name, as_before(cls, _Unnumbered))
            yield f"{cls.__name__} of transformers asks for {_NUMBER} now; a stand-in takes none"


def _form(cls: type) -> type[_Unnumbered] | None:
    """Return which base a class was written for; None where it is that of today."""
    nodes = list(ast.walk(parsed_code(cls)))
    attributes = [
        x for x in nodes if isinstance(x, ast.Attribute) and ast.unparse(x.value) == "self"
    ]
    stored = {x.attr for x in attributes if isinstance(x.ctx, ast.Store)}
    left = {x.attr for x in attributes} - stored
    if any(base.__name__.endswith("Attention") for base in cls.__bases__) and left & _LEFT:
        return _Rotating if _ROTARY in left else _Sized
    return _Unnumbered if any(map(_is_of_a_config, calls_of_base(cls))) else None


def _is_of_a_config(call: ast.Call) -> bool:
    """Whether a call gives a config alone, perhaps behind `self`."""
    given = [ast.unparse(x) for x in (*call.args, *(x.value for x in call.keywords))]
    return [x for x in given if x != "self"] in (["config"], ["self.config"])


def _asks(cls: Any) -> bool:
    """Whether a class is one of transformers' modules, and has to be told a layer's number."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        return False
    if not cls.__module__.startswith("transformers.models.") or issubclass(cls, _Unnumbered):
        return False
    parameters = inspect.signature(cls).parameters
    return list(parameters)[:2] == ["config", _NUMBER]
