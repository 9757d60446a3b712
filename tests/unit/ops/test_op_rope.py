from __future__ import annotations

import pytest
import torch
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

import onboard.ops  # noqa: F401
from onboard.ops.rope.rope import complex_freqs
from tests.support.ops.naive import relative_error

ops = torch.ops.onboard


def angles(batch: int, length: int, size: int) -> torch.Tensor:
    return torch.rand(batch, length, size // 2) * 6.28


def table(batch: int, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = angles(batch, length, size).repeat(1, 1, 2)
    return both.cos(), both.sin()


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize(("dim", "shape"), [(1, (2, 4, 5, 8)), (2, (2, 5, 4, 8))])
def test_half_rotation_is_that_of_hugging_face(dim: int, shape: tuple[int, ...]) -> None:
    q, k, (cos, sin) = heads(*shape), heads(*shape)[:, : shape[1]], table(2, 5, 8)
    actual = ops.torch_rope_with_explicit_cos_sin(q, k, cos, sin, dim)
    for ours, theirs in zip(
        actual, apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=dim), strict=True
    ):
        assert relative_error(ours, theirs) < 1e-7


def test_half_rotation_turns_channel_i_with_channel_i_plus_half() -> None:
    q, k, angle = heads(2, 5, 4, 10), heads(2, 5, 1, 10), angles(2, 5, 6)
    both = angle.repeat(1, 1, 2)
    for ours, x in zip(
        ops.torch_rope_with_explicit_cos_sin(q, k, both.cos(), both.sin(), 2), (q, k), strict=True
    ):
        turned = (
            torch.complex(x[..., :3].double(), x[..., 3:6].double())
            * torch.exp(1j * angle.double())[:, :, None]
        )
        assert (
            relative_error(ours, torch.cat([turned.real, turned.imag, x[..., 6:].double()], -1))
            < 1e-6
        )


def test_a_float32_table_is_cast_to_the_dtype_of_the_query() -> None:
    q, k, (cos, sin) = heads(1, 5, 4, 8).bfloat16(), heads(1, 5, 2, 8).bfloat16(), table(1, 5, 8)
    actual = ops.torch_rope_with_explicit_cos_sin(q, k, cos, sin, 2)
    expected = ops.torch_rope_with_explicit_cos_sin(q, k, cos.bfloat16(), sin.bfloat16(), 2)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs)


def test_complex_rotation_is_that_of_llama4_and_of_cohere() -> None:
    q, k, angle = heads(2, 5, 4, 8), heads(2, 5, 2, 8), angles(2, 5, 8)
    actual = ops.torch_rope_with_complex_freqs(q, k, torch.polar(torch.ones_like(angle), angle))
    expected = [
        apply_rotary_emb(x, x, torch.polar(torch.ones_like(angle), angle))[0] for x in (q, k)
    ]
    doubled = angle.repeat_interleave(2, -1)
    cohere_way = cohere.apply_rotary_pos_emb(q, k, doubled.cos(), doubled.sin(), unsqueeze_dim=2)
    for ours, llama4, theirs in zip(actual, expected, cohere_way, strict=True):
        assert relative_error(ours, llama4) < 1e-7
        assert relative_error(ours, theirs) < 1e-6


def test_complex_rotation_in_bnsd_and_over_a_part_of_the_channels() -> None:
    q, k, angle = heads(2, 4, 5, 12), heads(2, 2, 5, 12), angles(2, 5, 8)
    freqs = torch.polar(torch.ones_like(angle), angle)
    bnsd = ops.torch_rope_with_complex_freqs(q, k, freqs, 1)
    whole = ops.torch_rope_with_complex_freqs(
        q[..., :8].transpose(1, 2), k[..., :8].transpose(1, 2), freqs
    )
    for x, ours, rotated in zip((q, k), bnsd, whole, strict=True):
        assert torch.equal(ours[..., 8:], x[..., 8:])
        assert relative_error(ours[..., :8], rotated.transpose(1, 2)) < 1e-7


def test_interleaving_is_that_of_deepseek() -> None:
    q, k, (cos, sin) = heads(2, 4, 5, 8), heads(2, 1, 5, 8), table(2, 5, 8)
    actual = ops.torch_rope_with_qk_interleaving(q, k, cos, sin)
    for ours, theirs in zip(actual, apply_rotary_pos_emb_interleave(q, k, cos, sin), strict=True):
        assert relative_error(ours, theirs) < 1e-7


def test_rope_cached_is_the_half_rotation_in_bsnd() -> None:
    q, k, (cos, sin) = heads(2, 5, 4, 10), heads(2, 5, 2, 10), table(2, 5, 6)
    expected = ops.torch_rope_with_explicit_cos_sin(q, k, cos, sin, 2)
    for ours, theirs in zip(ops.torch_rope_cached(q, k, cos, sin), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [6, 8])
def test_registration_is_sound(size: int) -> None:
    q, k, (cos, sin) = heads(2, 5, 4, 8), heads(2, 5, 2, 8), table(2, 5, size)
    torch.library.opcheck(ops.torch_rope_with_explicit_cos_sin.default, (q, k, cos, sin, 2))
    torch.library.opcheck(ops.torch_rope_with_qk_interleaving.default, (q, k, cos, sin, 2))
    torch.library.opcheck(ops.torch_rope_cached.default, (q, k, cos, sin))
    freqs = torch.polar(torch.ones(2, 5, size // 2), angles(2, 5, size))
    torch.library.opcheck(ops.torch_rope_with_complex_freqs.default, (q, k, freqs))


@pytest.mark.parametrize("size", [6, 8])
@pytest.mark.parametrize("dim", [1, 2])
def test_fake_results_lie_in_memory_as_real_ones_do(size: int, dim: int) -> None:
    """Heads swapped with the sequence, and cut out of a projection of queries, keys and values."""
    cos, sin = table(2, 5, size)
    freqs = torch.polar(torch.ones(2, 5, size // 2), angles(2, 5, size))
    for q, k in ((heads(2, 5, 4, 8), heads(2, 5, 2, 8)), heads(2, 5, 6, 8).split((4, 2), dim=2)):
        q, k = (x.transpose(1, 2) if dim == 1 else x for x in (q, k))
        for op in (ops.torch_rope_with_explicit_cos_sin, ops.torch_rope_with_qk_interleaving):
            torch.library.opcheck(op.default, (q, k, cos, sin, dim), test_utils="test_faketensor")
        torch.library.opcheck(
            ops.torch_rope_with_complex_freqs.default,
            (q, k, freqs, dim),
            test_utils="test_faketensor",
        )


@pytest.mark.parametrize("side_by_side", [True, False])
def test_complex_frequencies_are_read_off_either_layout_of_a_table(side_by_side: bool) -> None:
    angle = angles(2, 5, 12)
    both = angle.repeat_interleave(2, -1) if side_by_side else angle.repeat(1, 1, 2)
    assert (
        relative_error(
            torch.view_as_real(complex_freqs(both.cos(), both.sin())),
            torch.view_as_real(torch.polar(torch.ones_like(angle), angle)),
        )
        < 1e-6
    )


def test_neighbours_that_turn_against_each_other_are_two_frequencies() -> None:
    """Their cosines are equal, their sines are not."""
    angle = torch.stack([once := angles(1, 4, 6), -once], -1).flatten(-2)
    both = angle.repeat(1, 1, 2)
    assert torch.equal(complex_freqs(both.cos(), both.sin()).imag, angle.sin())


def test_fused_rotations_of_pairs_are_those_in_bsnd() -> None:
    q, k, (cos, sin), angle = (
        heads(2, 5, 4, 12),
        heads(2, 5, 1, 12),
        table(2, 5, 8),
        angles(2, 5, 8),
    )
    rest = [x[..., 8:] for x in (q, k)]
    freqs = torch.polar(torch.full_like(angle, 1.25), angle)
    turned = [
        torch.complex(x[..., 0:8:2], x[..., 1:8:2]).to(torch.complex128) * freqs[:, :, None]
        for x in (q, k)
    ]
    for ours, pairs, passed in zip(ops.torch_rope_pairs(q, k, freqs), turned, rest, strict=True):
        assert (
            relative_error(ours, torch.cat([torch.view_as_real(pairs).flatten(-2), passed], -1))
            < 1e-6
        )
    theirs = apply_rotary_pos_emb_interleave(q[..., :8], k[..., :8], cos, sin, unsqueeze_dim=2)
    for ours, rotated, passed in zip(
        ops.torch_rope_deinterleaved(q, k, cos, sin), theirs, rest, strict=True
    ):
        assert relative_error(ours, torch.cat([rotated, passed], -1)) < 1e-7
