"""Rotary embeddings of transformers' models as they were before 4.45: made of sizes, not of a config,
and before 4.38 with tables that are cut to the text's length, in which positions are looked up; and
as transformers 4 made them of a config, which says in fields of its own what RoPE is.

A file that calls them so gets them so; other files get what transformers has.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from onboard.hf.old.gone import Gone
from onboard.hf.parsed_code import parsed_code
from onboard.plain_config import ROPE_INIT_FUNCTIONS

_SIZES = {"dim", "max_position_embeddings", "base"}
_CLASS, _FUNCTION = "RotaryEmbedding", "apply_rotary_pos_emb"
_FREQUENCIES = "compute_default_rope_parameters"
_KEEPING = "keeps_tables"
_PLAIN = "default"


class SizedRotaryEmbedding(nn.Module):
    """cos and sin of plain RoPE (Su et al. 2021, arXiv:2104.09864), each frequency twice."""

    inv_freq: torch.Tensor
    cos_cached: torch.Tensor
    sin_cached: torch.Tensor

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000,
        device: Any = None,
        scaling_factor: float = 1.0,
    ) -> None:
        super().__init__()
        if scaling_factor != 1.0:
            Gone("RoPE with a scaling_factor", "Use a config without rope_scaling").refuse()
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float().to(device) / dim
        self.register_buffer("inv_freq", 1.0 / (base**exponents), persistent=False)
        rows = torch.arange(max_position_embeddings, device=device, dtype=torch.int64).float()
        angles = torch.outer(rows, self.inv_freq)
        self.register_buffer("cos_cached", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin_cached", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor | None = None, seq_len: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables' first rows [seq_len, dim], or those of positions [batch, seq, dim]."""
        if position_ids is None:
            cos, sin = self.cos_cached[:seq_len], self.sin_cached[:seq_len]
        else:
            cos, sin = self.cos_cached[position_ids], self.sin_cached[position_ids]
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class PlainRotaryEmbedding(nn.Module):
    """cos and sin of plain RoPE, each frequency twice, made of a config's fields `rope_theta` and
    `partial_rotary_factor`, as every class of transformers 4 did.
    """

    inv_freq: torch.Tensor

    def __init__(self, config: Any, device: Any = None) -> None:
        super().__init__()
        inv_freq, self.attention_scaling = ROPE_INIT_FUNCTIONS["default"](config, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows [batch, seq, rotary_dim] of positions [batch, seq], in the dtype of x."""
        freqs = position_ids[:, :, None].float() * self.inv_freq[None, None, :].float()
        angles = torch.cat((freqs, freqs), dim=-1)
        cos = angles.cos() * self.attention_scaling
        sin = angles.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def give_plain_rotary(package: str, config: Any) -> list[str]:
    """Give the modules of a package rotary embeddings made of a config's own fields, where those of
    transformers 5 leave out what the fields of this config say; return what was given.
    """
    table = getattr(config, "rope_parameters", None)
    if table and (not isinstance(table, dict) or table.get("rope_type") != _PLAIN):
        return []
    left_out = getattr(config, "partial_rotary_factor", None) if table else config
    if left_out in (None, 1.0) or getattr(config, "rope_theta", None) is None:
        return []
    alike = ("forward", _FREQUENCIES) if table else ("forward",)
    facts = []
    for module in [item for key, item in sys.modules.items() if key.startswith(f"{package}.")]:
        for name in [key for key, value in vars(module).items() if _is_alike(value, alike)]:
            setattr(module, name, PlainRotaryEmbedding)
            facts.append(f"{name} of transformers does not read rope_theta; a stand-in does")
        for heir in [value for value in vars(module).values() if _is_heir(value, module, alike)]:
            heir.__bases__ = tuple(
                PlainRotaryEmbedding if _is_alike(base, alike) else base for base in heir.__bases__
            )
            facts.append(f"the base of {heir.__name__} does not read rope_theta; a stand-in does")
    return facts


def _is_heir(value: Any, module: ModuleType, methods: Iterable[str]) -> bool:
    """Whether a value is a class of a module's own, and inherits from such a rotary class."""
    return (
        inspect.isclass(value)
        and value.__module__ == module.__name__
        and any(_is_alike(base, methods) for base in value.__bases__)
    )


def _is_alike(value: Any, methods: Iterable[str]) -> bool:
    """Whether a value is a rotary class of transformers whose methods are as Llama's."""
    if not (inspect.isclass(value) and value.__module__.startswith("transformers.models.")):
        return False
    pairs = (
        [getattr(cls, name, None) for cls in (value, LlamaRotaryEmbedding)] for name in methods
    )
    return hasattr(value, _FREQUENCIES) and all(_lines(one) == _lines(two) for one, two in pairs)


def _lines(function: Any) -> list[str]:
    """Return what a function does, without its annotations and words."""
    tree = parsed_code(function)
    assert isinstance(tree, ast.FunctionDef)
    return [ast.unparse(node) for node in tree.body if not _is_text(node)]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotated_by_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, rotated by the rows of their positions in tables [rows, dim]."""
    cos = cos[position_ids].unsqueeze(unsqueeze_dim)
    sin = sin[position_ids].unsqueeze(unsqueeze_dim)
    return (q * cos) + (_turned(q) * sin), (k * cos) + (_turned(k) * sin)


def rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, rotated by cos and sin [batch, seq, dim]; positions are not read."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (_turned(q) * sin), (k * cos) + (_turned(k) * sin)


def give_rotary_forms(package: str) -> list[str]:
    """Give the modules of a package the forms that they call; return what was given."""
    modules = [module for key, module in sys.modules.items() if key.startswith(f"{package}.")]
    return [fact for module in modules for fact in _give(module)]


def _give(module: ModuleType) -> list[str]:
    path = getattr(module, "__file__", None)
    if path is None:
        return []
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(module)))]
    called = [node for node in calls if isinstance(node, ast.Call)]
    looks_up = any(item.arg == "seq_len" for node in called for item in node.keywords)
    facts = []
    for name, found in list(vars(module).items()):
        own = [node for node in called if isinstance(node.func, ast.Name) and node.func.id == name]
        if not own or not str(getattr(found, "__module__", "")).startswith("transformers.models."):
            continue
        form: Any = None
        if name.endswith(_CLASS) and inspect.isclass(found) and any(map(_is_sized, own)):
            form = SizedRotaryEmbedding
        elif name == _FUNCTION and any(map(_has_positions, own)):
            form = rotated_by_rows if looks_up else rotated
        if form is not None and not _takes(found, form):
            setattr(module, name, form)
            facts.append(
                f"{name} of transformers has other arguments now; a stand-in takes its place"
            )
    return facts


def take_device(cls: Any) -> list[str]:
    """Have a rotary class of transformers make its frequencies of a config, a device and a length,
    as code of transformers 5.0 asks for them; return what was given.
    """
    made = getattr(cls, _FREQUENCIES, None) if inspect.isclass(cls) else None
    of_transformers = str(getattr(cls, "__module__", "")).startswith("transformers.models.")
    if made is None or not of_transformers or "device" in inspect.signature(made).parameters:
        return []

    def frequencies(config: Any = None, device: Any = None, *_: Any, **kwargs: Any) -> Any:
        table, factor = made(config, **kwargs)
        return table.to(device), factor

    setattr(cls, _FREQUENCIES, staticmethod(frequencies))
    return [f"{cls.__name__}.{_FREQUENCIES} takes no device now; a stand-in does"]


def keep_tables() -> list[str]:
    """Have rotary embeddings whose class is not transformers' and has no way to compute its
    frequencies anew keep what their constructors made of the config as it was then.
    """
    made = PreTrainedModel._init_weights
    if hasattr(made, _KEEPING):
        return []

    @functools.wraps(made)
    def init(self: Any, module: nn.Module) -> None:
        cls = type(module)
        is_own = not cls.__module__.startswith("transformers.") and not hasattr(cls, _FREQUENCIES)
        if not (is_own and hasattr(module, "original_inv_freq")):
            made(self, module)

    setattr(init, _KEEPING, True)
    PreTrainedModel._init_weights = init
    return ["rotary embeddings keep the tables that their constructors made"]


def _is_sized(node: ast.Call) -> bool:
    """Whether a call says sizes, and no config."""
    keywords = {item.arg for item in node.keywords}
    return bool(keywords & _SIZES) and "config" not in keywords


def _has_positions(node: ast.Call) -> bool:
    keywords = {item.arg for item in node.keywords}
    return "position_ids" in keywords or len(node.args) == 5


def _takes(found: Any, form: Any) -> bool:
    """Whether what transformers has today takes the arguments of a form."""
    wanted = "dim" if inspect.isclass(found) else "position_ids"
    return wanted in inspect.signature(found).parameters
