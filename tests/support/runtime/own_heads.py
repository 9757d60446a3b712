"""Tiny checkpoints with heads for multi-token prediction under the names of releases, and the heads
written out in plain torch, on transformers' own layers.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 2.2, equations 21 to 24.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.runtime.tiny import Tiny, make_tiny

Names = dict[str, str]
"""What of a head -> its name in a release; `block` is what its layer's names begin with."""


def _beside_layers(number: int, layers: int) -> Names:
    at = f"model.layers.{layers + number}."
    return {
        "block": at,
        "embedding": f"{at}enorm.weight",
        "hidden": f"{at}hnorm.weight",
        "projection": f"{at}eh_proj.weight",
        "final": f"{at}shared_head.norm.weight",
        "own embedding": f"{at}embed_tokens.weight",
        "own head": f"{at}shared_head.head.weight",
    }


def _by_kind(number: int, layers: int) -> Names:
    return {
        "block": f"model.mtp_block.{number}.",
        "embedding": f"model.mtp_emb_norm.{number}.weight",
        "hidden": f"model.mtp_hidden_norm.{number}.weight",
        "projection": f"model.mtp_linear_proj.{number}.weight",
    }


def _in_a_list(number: int, layers: int) -> Names:
    at = f"model.mtp_layers.{number}."
    return {
        "block": at,
        "embedding": f"{at}token_layernorm.weight",
        "hidden": f"{at}hidden_layernorm.weight",
        "projection": f"{at}input_proj.weight",
        "final": f"{at}final_layernorm.weight",
    }


def _in_a_tree(number: int, layers: int) -> Names:
    return {
        "block": f"mtp.layers.{number}.",
        "embedding": "mtp.pre_fc_norm_embedding.weight",
        "hidden": "mtp.pre_fc_norm_hidden.weight",
        "projection": "mtp.fc.weight",
        "final": "mtp.norm.weight",
    }


RELEASES: dict[str, Callable[[int, int], Names]] = {
    "DeepSeek-V3, GLM-4.5": _beside_layers,
    "ERNIE 4.5": _by_kind,
    "MiMo": _in_a_list,
    "Qwen3-Next": _in_a_tree,
}
HIDDEN_FIRST = {"MiMo"}
"""Releases whose projections read the hidden state before the embedding."""


@dataclass(frozen=True)
class PlainHead:
    """A head as the paper writes it."""

    layer: nn.Module
    embedding_norm: nn.Module
    hidden_norm: nn.Module
    final_norm: nn.Module
    projection: Tensor
    hidden_first: bool

    def states(self, model: Any, tokens: Tensor, given: Tensor) -> Tensor:
        """Return the normed states [rows, hidden] of rows: the tokens [rows] that they embed, and the
        states [rows, hidden] that they begin with.
        """
        parts = [self.embedding_norm(model.model.embed_tokens(tokens)), self.hidden_norm(given)]
        joined = torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1)
        hidden = (joined @ self.projection.T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -1e30).triu(1)
        out = self.layer(
            hidden,
            attention_mask=mask.to(hidden.dtype)[None, None],
            position_ids=positions,
            position_embeddings=model.model.rotary_emb(hidden, positions),
        )
        out = out[0] if isinstance(out, tuple) else out
        return self.final_norm(out)[0]


@dataclass
class Headed:
    """A tiny checkpoint with heads, and what they compute."""

    tiny: Tiny
    heads: list[PlainHead]

    @torch.no_grad()
    def rows(self, ids: Sequence[int]) -> list[Tensor]:
        """Return the logits of each head for each token that it can begin with, [rows, vocabulary]:
        row i of head k predicts token i + k + 2, k counted from 0.
        """
        model, tokens = self.tiny.hf, torch.tensor(ids)
        given = model.model(tokens[None], use_cache=False).last_hidden_state[0]
        found = []
        for number, head in enumerate(self.heads):
            later = tokens[number + 1 :]
            given = head.states(model, later, given[: len(later)])
            found.append(model.lm_head(given))
        return found

    @torch.no_grad()
    def chain(self, ids: Sequence[int], count: int) -> list[int]:
        """Return the likeliest `count` tokens after a text, whose last token the model has not read,
        as the heads draft them: one a head, or all by the only one.
        """
        model, tokens = self.tiny.hf, torch.tensor(ids)
        given = model.model(tokens[None, :-1], use_cache=False).last_hidden_state[0]
        drafts: list[int] = []
        for step in range(count):
            head = self.heads[min(step, len(self.heads) - 1)]
            known = torch.cat([tokens, torch.tensor(drafts, dtype=torch.long)])
            shift = 1 + (step if len(self.heads) > 1 else 0)
            states = head.states(model, known[shift:], given)
            drafts.append(int(model.lm_head(states[-1]).argmax()))
            # Several heads go on from one another's states, row by row; one goes on from its last
            given = states if len(self.heads) > 1 else torch.cat([given, states[-1:]])
        return drafts

    def doubled(self) -> Headed:
        """Return it in float64."""
        self.tiny.hf.double()
        for head in self.heads:
            for module in (head.layer, head.embedding_norm, head.hidden_norm, head.final_norm):
                module.double()
        heads = [replace(head, projection=head.projection.double()) for head in self.heads]
        return Headed(self.tiny, heads)


def make_headed(
    folder: Path, release: str, model_type: str, count: int = 1, **options: Any
) -> Headed:
    """Save a random model, and random heads whose layers are like its last one."""
    tiny = make_tiny(folder, model_type, own_file=False, **options)
    path = tiny.checkpoint / "model.safetensors"
    stored = load_file(path)
    model, layers = tiny.hf.model, len(tiny.hf.model.layers)
    last = f"model.layers.{layers - 1}."
    tensors, heads = {}, []
    for number in range(count):
        names, size = RELEASES[release](number, layers), tiny.hf.config.hidden_size
        block = {
            name.removeprefix(last): _random(each)
            for name, each in stored.items()
            if name.startswith(last)
        }
        tensors |= {names["block"] + name: each for name, each in block.items()}
        norms = {what: _random(model.norm.weight) for what in ("embedding", "hidden", "final")}
        projection = _random(torch.empty(size, 2 * size))
        tensors |= {names[what]: each for what, each in norms.items() if what in names}
        tensors[names["projection"]] = projection
        for what, name in (("own embedding", "embed_tokens"), ("own head", "lm_head")):
            if what in names:
                tensors[names[what]] = stored[
                    f"{'model.' * (name != 'lm_head')}{name}.weight"
                ].clone()
        heads.append(
            PlainHead(
                _layer(tiny, stored, last, block, folder),
                *(_norm(model.norm, norms[what]) for what in ("embedding", "hidden")),
                _norm(model.norm, norms["final"]) if "final" in names else model.norm,
                projection,
                release in HIDDEN_FIRST,
            )
        )
    save_file(stored | tensors, path, metadata={"format": "pt"})
    return Headed(tiny, heads)


def _random(like: Tensor) -> Tensor:
    tensor = torch.randn(like.shape) * 0.2 + (like.ndim == 1)
    return tensor.contiguous()


def _norm(like: nn.Module, weight: Tensor) -> nn.Module:
    norm = copy.deepcopy(like)
    norm.weight.data.copy_(weight)
    return norm


def _layer(
    tiny: Tiny, stored: dict[str, Tensor], last: str, block: dict[str, Tensor], folder: Path
) -> nn.Module:
    """Return transformers' layer with these weights, loaded as it loads them: another model has them
    as its last layer.
    """
    other = folder / "like_the_head"
    other.mkdir(exist_ok=True)
    (other / "config.json").write_bytes((tiny.checkpoint / "config.json").read_bytes())
    tensors = stored | {last + name: each for name, each in block.items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    model = type(tiny.hf).from_pretrained(other, attn_implementation="eager", dtype=torch.float32)
    return model.model.layers[-1].eval()
