from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.graph.harness import transform, worst_error

KEY = "match_rope_pattern"
EXPLICIT = torch.ops.onboard.torch_rope_with_explicit_cos_sin
INTERLEAVED = torch.ops.onboard.torch_rope_with_qk_interleaving
COMPLEX = torch.ops.onboard.torch_rope_with_complex_freqs
HEADS, KV_HEADS, SIZE, ROTARY = 4, 2, 16, 8


def _tables(batch: int, sequence: int, size: int = SIZE) -> tuple[Tensor, Tensor]:
    angles = torch.randn(batch, sequence, size // 2).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def _inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    cos, sin = _tables(batch, sequence)
    query, key = (
        torch.randn(batch, sequence, HEADS, SIZE),
        torch.randn(batch, sequence, KV_HEADS, SIZE),
    )
    return {"q": query, "k": key, "cos": cos, "sin": sin}


def _partial_inputs(batch: int, sequence: int) -> dict[str, Tensor]:
    cos, sin = _tables(batch, sequence, ROTARY)
    return {**_inputs(batch, sequence), "cos": cos, "sin": sin}


class _Heads(nn.Module):
    """Llama's form; `unsqueeze_dim` 1 wants heads before sequence."""

    def __init__(self, unsqueeze_dim: int) -> None:
        super().__init__()
        self.unsqueeze_dim = unsqueeze_dim

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.unsqueeze_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=self.unsqueeze_dim)
        return torch.cat((q, k), dim=self.unsqueeze_dim)


class _Partial(nn.Module):
    """GPT-NeoX and Phi: the first channels rotate, the rest pass."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_rotated, k_rotated = apply_rotary_pos_emb(
            q[..., :ROTARY], k[..., :ROTARY], cos, sin, unsqueeze_dim=2
        )
        query = torch.cat((q_rotated, q[..., ROTARY:]), dim=-1)
        return torch.cat((query, torch.cat((k_rotated, k[..., ROTARY:]), dim=-1)), dim=2)


class _SwappedRest(nn.Module):
    """The channels that pass come first: not what the op does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_rotated, k_rotated = apply_rotary_pos_emb(
            q[..., ROTARY:], k[..., ROTARY:], cos, sin, unsqueeze_dim=2
        )
        query = torch.cat((q[..., :ROTARY], q_rotated), dim=-1)
        return torch.cat((query, torch.cat((k[..., :ROTARY], k_rotated), dim=-1)), dim=2)


class _Deinterleaving(nn.Module):
    """DeepSeek: even channels first, then the half rotation."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = self._sorted(q.transpose(1, 2)), self._sorted(k.transpose(1, 2))
        return torch.cat(apply_rotary_pos_emb(q, k, cos, sin), dim=1)

    def _sorted(self, x: Tensor) -> Tensor:
        batch, heads, sequence, size = x.shape
        return (
            x.view(batch, heads, sequence, size // 2, 2)
            .transpose(4, 3)
            .reshape(batch, heads, sequence, size)
        )


@pytest.mark.parametrize(
    ("module", "op"),
    [(_Heads(1), EXPLICIT), (_Heads(2), EXPLICIT), (_Deinterleaving(), INTERLEAVED)],
)
def test_rotations_of_whole_heads_become_one_op(module: nn.Module, op: object) -> None:
    result = transform([KEY], module, _inputs(2, 5))

    assert result.matches[KEY] == 1
    assert result.count(op) == 1
    assert result.count(torch.ops.aten.neg) == 0
    assert worst_error(result, module, _inputs) < 1e-6


class _FromTheEnd(nn.Module):
    """Tables with a dimension for heads that is counted from the end."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat(apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=-2), dim=2)


def test_a_dimension_counted_from_the_end_is_in_the_layout_that_it_is_in() -> None:
    result = transform([KEY, "match_rope_layout"], _FromTheEnd(), _inputs(2, 5))

    assert (result.matches[KEY], result.matches["match_rope_layout"]) == (1, 0)
    assert worst_error(result, _FromTheEnd(), _inputs) < 1e-6


def test_channels_that_pass_are_part_of_the_op() -> None:
    result = transform([KEY], _Partial(), _partial_inputs(2, 5))

    assert result.matches[KEY] == 1
    assert result.count(torch.ops.aten.cat) == 1  # the test module's own
    assert worst_error(result, _Partial(), _partial_inputs) < 1e-6


def test_rotating_other_channels_matches_the_rotation_alone() -> None:
    result = transform([KEY], _SwappedRest(), _partial_inputs(2, 5))

    assert result.matches[KEY] == 1
    assert result.count(torch.ops.aten.cat) == 3
    assert worst_error(result, _SwappedRest(), _partial_inputs) < 1e-6


class _Complex(nn.Module):
    """Llama's original form, as Llama 4 has it."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        freqs = torch.complex(cos, sin)[..., : SIZE // 2]
        return torch.cat((self._rotated(q, freqs), self._rotated(k, freqs)), dim=2)

    def _rotated(self, x: Tensor, freqs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs[:, :, None, :]).flatten(3).type_as(x)


def test_complex_rotation_is_matched() -> None:
    result = transform([KEY], _Complex(), _inputs(2, 5))

    assert result.matches[KEY] == 1
    assert result.count(COMPLEX) == 1
    assert worst_error(result, _Complex(), _inputs) < 1e-6


class _Unlike(nn.Module):
    """A query and a key with different tables must not share an op."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, _ = apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)
        _, other = apply_rotary_pos_emb(k, k, sin, cos, unsqueeze_dim=2)
        return torch.cat((rotated, other), dim=2)


def test_rotations_without_a_partner_stay_and_are_recorded() -> None:
    result = transform([KEY], _Unlike(), _inputs(2, 5))

    assert result.matches[KEY] == 0
    assert result.facts == ["match_rope_pattern: 2 rotations have no partner and stay written out"]
    assert worst_error(result, _Unlike(), _inputs) < 1e-6


class _Dependent(nn.Module):
    """The key is computed from the rotated query: one op cannot do both."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, _ = apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)
        k, _ = apply_rotary_pos_emb(k + q.mean(), k, cos, sin, unsqueeze_dim=2)
        return torch.cat((q, k), dim=2)


def test_dependent_rotations_stay() -> None:
    result = transform([KEY], _Dependent(), _inputs(2, 5))

    assert result.matches[KEY] == 0
    assert worst_error(result, _Dependent(), _inputs) < 1e-6
