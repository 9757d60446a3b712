"""Attention modules of transformers' models as they were before 4.48: they turn queries and keys
themselves, by positions, give the cache back, and have methods that cut channels into heads.

A file that calls them so gets them so; other files get what transformers has.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.models.llama import modeling_llama

from onboard.hf.old.gone import Gone
from onboard.hf.old.rotary_forms import SizedRotaryEmbedding
from onboard.hf.parsed_code import parsed_code

_CACHE, _TABLES = "past_key_value", "position_embeddings"
_PLAIN = "default"
_CAUSAL_ALONE = "sdpa"
"""The attention that was causal where it was given no mask."""
_FUNCTIONS = ("apply_rotary_pos_emb", "repeat_kv")
_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}


class _Turning:
    """Grouped-query attention [batch, sequence, hidden] to the same, with its own plain RoPE: laid
    over a class of transformers.
    """

    def __init__(self: Any, config: Any, layer_idx: int | None = None) -> None:
        scaling = getattr(config, "rope_scaling", None) or {}
        if scaling.get("rope_type", scaling.get("type", _PLAIN)) != _PLAIN:
            Gone("transformers' attention with RoPE that is scaled", "Use plain RoPE").refuse()
        super().__init__(config, 0 if layer_idx is None else layer_idx)  # type: ignore[call-arg]
        if {name for name, _ in self.named_children()} != _PARTS:
            Gone(
                "transformers' attention with norms of its own", "Hand over tables of RoPE"
            ).refuse()
        self.hidden_size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_position_embeddings = config.max_position_embeddings
        self.rope_theta = config.rope_theta
        self.rotary_emb = SizedRotaryEmbedding(
            self.head_dim, config.max_position_embeddings, config.rope_theta
        )

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """Return attention's output, its weights where they are asked for, and the cache."""
        batch, length = hidden_states.shape[:-1]
        shape = (batch, length, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = self.rotary_emb(value, position_ids)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
        if past_key_value is not None:
            key, value = past_key_value.update(key, value, self.layer_idx)
        key = modeling_llama.repeat_kv(key, self.num_key_value_groups)
        value = modeling_llama.repeat_kv(value, self.num_key_value_groups)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        if attention_mask is not None:
            scores = scores + attention_mask[:, :, :, : key.shape[-2]]
        elif self.config._attn_implementation == _CAUSAL_ALONE:
            later = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        out = torch.matmul(weights, value).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(out), weights if output_attentions else None, past_key_value


class HeadForms:
    """Methods for heads that classes of transformers had, laid under classes that inherit from one
    which has them no longer. Of all classes that had them with these arguments, each did this.
    """

    def _split_heads(
        self, tensor: torch.Tensor, num_heads: int, attn_head_size: int
    ) -> torch.Tensor:
        """Return [batch, heads, sequence, size] of [batch, sequence, heads * size]."""
        shape = (*tensor.shape[:-1], num_heads, attn_head_size)
        return tensor.view(shape).permute(0, 2, 1, 3)

    def _merge_heads(
        self, tensor: torch.Tensor, num_heads: int, attn_head_size: int
    ) -> torch.Tensor:
        """Return [batch, sequence, heads * size] of [batch, heads, sequence, size]."""
        moved = tensor.permute(0, 2, 1, 3).contiguous()
        return moved.view(*moved.shape[:-2], num_heads * attn_head_size)

    def _shape(self: Any, tensor: torch.Tensor, seq_len: int, bsz: int) -> torch.Tensor:
        """Return [batch, heads, sequence, size] of [batch, sequence, heads * size]."""
        cut = tensor.view(bsz, seq_len, self.num_heads, self.head_dim)
        return cut.transpose(1, 2).contiguous()


_FORMS = [name for name in vars(HeadForms) if not name.startswith("__")]


def give_attention_modules(package: str) -> list[str]:
    """Give the modules of a package the attention that they call, and their classes the methods of
    transformers' that they call; return what was given.
    """
    modules = [module for key, module in sys.modules.items() if key.startswith(f"{package}.")]
    facts = [fact for module in modules for fact in _give(module)]
    return facts + [fact for module in modules for fact in _give_forms(module)]


def _give_forms(module: ModuleType) -> list[str]:
    """Lay methods for heads under a module's own classes of attention that call them in vain."""
    facts = []
    for cls in [item for item in vars(module).values() if isinstance(item, type)]:
        heir = next((base for base in cls.__mro__ if _is_attention(base)), None)
        if cls.__module__ == module.__name__ and heir is not None:
            lost = sorted(name for name in _called_with_three(cls) if not hasattr(cls, name))
            if lost:
                cls.__bases__ = (*cls.__bases__, HeadForms)
                facts += [f"{heir.__name__}.{name} is gone; a stand-in does it" for name in lost]
    return facts


def _is_attention(cls: type) -> bool:
    return cls.__module__.startswith("transformers.models.") and cls.__name__.endswith("Attention")


def _called_with_three(cls: type) -> set[str]:
    """Return the methods for heads that a class calls on itself with their three arguments."""
    calls = [x for x in ast.walk(parsed_code(cls)) if isinstance(x, ast.Call)]
    return {
        call.func.attr
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "self"
        and call.func.attr in _FORMS
        and len(call.args) + len(call.keywords) == 3
    }


def _give(module: ModuleType) -> list[str]:
    tables = [vars(module), *(value for value in vars(module).values() if isinstance(value, dict))]
    given = [
        (table, key) for table in tables for key, value in table.items() if _gets_tables(value)
    ]
    if not given or getattr(module, "__file__", None) is None or not _calls_so(module):
        return []
    what = " and ".join(sorted({table[key].__name__ for table, key in given}))
    for table, key in given:
        table[key] = turning(table[key])
    return [
        f"{what} of transformers gets tables of RoPE now; a stand-in makes them, as before 4.48"
    ]


def _gets_tables(value: Any) -> bool:
    """Whether a value is a class of attention that takes tables of RoPE, with functions for it."""
    if not (isinstance(value, type) and issubclass(value, nn.Module)):
        return False
    module = sys.modules.get(value.__module__)
    return (
        value.__module__.startswith("transformers.models.")
        and not issubclass(value, _Turning)
        and "layer_idx" in inspect.signature(value).parameters
        and _TABLES in inspect.signature(value.forward).parameters
        and value.__name__.endswith("Attention")
        and all(_is_llamas(name, module) for name in _FUNCTIONS)
    )


def _is_llamas(name: str, module: ModuleType | None) -> bool:
    """Whether a module has a function as Llama's."""
    pair = (getattr(each, name, None) for each in (module, modeling_llama))
    texts = [inspect.getsource(inspect.unwrap(each)) if each else "" for each in pair]
    return texts[0] == texts[1]


@cache
def turning(cls: Any) -> Any:
    """Return a class of attention as it was called before: it makes its own tables."""
    return type(f"Turning{cls.__name__}", (_Turning, cls), {"__module__": cls.__module__})


def _calls_so(module: ModuleType) -> bool:
    """Whether a file's calls hand over a cache by its old name, and no tables of RoPE."""
    tree = ast.parse(inspect.getsource(module))
    keywords = {item.arg for item in ast.walk(tree) if isinstance(item, ast.keyword)}
    return _CACHE in keywords and _TABLES not in keywords
