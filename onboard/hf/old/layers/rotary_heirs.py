"""Bases of rotary embeddings that inherit from one of transformers as it was made before 4.45, of sizes,
and before 4.57, on a device.
"""

from __future__ import annotations

import ast
import inspect
import sys
from typing import Any

import torch
from torch import nn

from onboard.hf.old.layers.laid_bases import calls_of_base, lay_under

_CLASS = "RotaryEmbedding"
_DEVICE = "device"
_SIZES = ("dim", "max_position_embeddings", "base")
_CONFIGS = ("config", "cfg")
_TABLES = ("cos_cached", "sin_cached")


class _OnDevice(nn.Module):
    """Laid over a rotary embedding: its constructor takes a device, too."""

    def __init__(self, config: Any, device: Any = None) -> None:
        super().__init__(config)


class _OfSizes(nn.Module):
    """Laid over a rotary embedding: cos and sin of plain RoPE (Su et al. 2021, arXiv:2104.09864) of
    positions [batch, seq], each frequency twice.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000,
        device: Any = None,
        scaling_factor: float = 1.0,
    ) -> None:
        nn.Module.__init__(self)
        self.dim = dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float().to(device) / dim
        self.register_buffer("inv_freq", 1.0 / (base**exponents), persistent=False)
        self.max_seq_len_cached = max_position_embeddings

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """Return the rows [batch, seq, dim] of positions, in the dtype of x."""
        angles = position_ids[:, :, None].float() * self.inv_freq[None, None, :].float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype=x.dtype), angles.sin().to(dtype=x.dtype)


class _OfTables(_OfSizes):
    """As before 4.38: with tables, which heirs may make otherwise, cut to the text's length."""

    cos_cached: torch.Tensor
    sin_cached: torch.Tensor

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000,
        device: Any = None,
    ) -> None:
        super().__init__(dim, max_position_embeddings, base, device)
        self._set_cos_sin_cache(max_position_embeddings, self.inv_freq.device, torch.float32)

    def _set_cos_sin_cache(self, seq_len: int, device: Any, dtype: Any) -> None:
        """Make the tables [seq_len, dim]."""
        self.max_seq_len_cached = seq_len
        rows = torch.arange(seq_len, device=device, dtype=self.inv_freq.dtype)
        angles = torch.outer(rows, self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_cached", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin_cached", angles.sin().to(dtype), persistent=False)

    def forward(self, x: torch.Tensor, seq_len: Any = None) -> Any:
        """Return the tables' first rows [seq_len, dim], or as many of them as tables of [1, 1, rows,
        dim] have, in the dtype of x.
        """
        if seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len=seq_len, device=x.device, dtype=x.dtype)
        cos, sin = self.cos_cached[..., :seq_len, :], self.sin_cached[..., :seq_len, :]
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def give_rotary_bases(package: str) -> list[str]:
    """Have rotary embeddings of a package inherit from such as they were written for; return what was
    given.
    """
    modules = [module for key, module in sys.modules.items() if key.startswith(f"{package}.")]
    return [fact for module in modules for fact in lay_under(module, _is_theirs, _form)]


def _is_theirs(cls: Any) -> bool:
    """Whether a class is one of transformers' rotary embeddings, made of a config alone."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        return False
    if not cls.__module__.startswith("transformers.models.") or issubclass(
        cls, _OnDevice | _OfSizes
    ):
        return False
    return cls.__name__.endswith(_CLASS) and [*inspect.signature(cls).parameters] == ["config"]


def _form(cls: type) -> type[nn.Module] | None:
    """Return the base that a class was written for; None where it is that of today."""
    calls = calls_of_base(cls)
    if any(map(_gives_sizes, calls)):
        text = inspect.getsource(cls)
        return _OfTables if any(name in text for name in _TABLES) else _OfSizes
    return _OnDevice if any(map(_gives_device, calls)) else None


def _gives_sizes(call: ast.Call) -> bool:
    """Whether a constructor is given the sizes of a rotary embedding, and no config."""
    first = call.args[0] if call.args else None
    if first is None or isinstance(first, ast.Starred):
        return any(item.arg in _SIZES for item in call.keywords)
    given = ast.unparse(first).lower()
    return given != "self" and not any(name in given for name in _CONFIGS)


def _gives_device(call: ast.Call) -> bool:
    """Whether a constructor is given a device, by its name or behind a config."""
    return len(call.args) == 2 or any(item.arg == _DEVICE for item in call.keywords)
