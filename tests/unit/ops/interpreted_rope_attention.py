"""Attention that rotates by itself, as kernels. Run by test_triton_kernels.py in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.attention.cached_attention import write_tokens
from onboard.ops.attention.rotation_kernels import Rotation
from onboard.ops.latent_attention import triton_cached_mla as cached_mla
from onboard.ops.latent_attention import triton_hopper_mla as hopper_mla
from onboard.ops.latent_attention.triton_cached_mla import absorb_keys
from onboard.ops.latent_attention.triton_hopper_mla import absorbed_queries
from tests.support.ops.naive import (
    Options,
    cached_attention,
    padded_to_captured,
    relative_error,
)
from tests.support.ops.ragged import (
    DEVICE,
    HOPPER_SIZES,
    PAGED,
    Row,
    captured,
    check,
    double,
    make_row,
    make_step,
    mla,
)
from tests.support.ops.ragged import STEPS as MLA_STEPS
from tests.support.ops.rotated import TURNS, rotate, tables, with_rotation
from tests.support.ops.seeds import seeded

ops: Any = torch.ops.onboard
LOW = {torch.bfloat16: 2.5e-2} if DEVICE == "cpu" else {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
STEPS = {
    "prefill": [(5, 5), (17, 17)],
    "decode": [(1, 1), (1, 9), (1, 130)],
    "mixed": [(1, 20), (7, 7), (1, 16)],
}


@pytest.mark.drawn
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("op", ["triton_cached_rope_attention", "invariant_cached_rope_attention"])
def test_attention(op: str, step: str, turns: str, flat: bool) -> None:
    seeded()
    options = Options(sinks=torch.randn(6), sliding_window=40)
    shapes = {"heads": 6, "dim": 24, "value_dim": 20, "padding": 2}
    batch, args, named, turned = with_rotation(STEPS[step], turns, 16, flat, **shapes)
    expected = cached_attention(turned, options)
    actual = getattr(ops, op)(*args, **named, **vars(options))
    assert relative_error(actual, expected) < 1e-5
    known = args[:10] + [batch.k_cache.clone(), batch.v_cache.clone()]
    ops.torch_cached_rope_attention(*known, **named)
    for mine, theirs in zip(args[10:], known[10:], strict=True):
        assert relative_error(mine[1:].nan_to_num(), theirs[1:].nan_to_num()) < 1e-6


@pytest.mark.drawn
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("op", ["triton_cached_rope_attention", "invariant_cached_rope_attention"])
def test_heads_are_normalised_before(op: str, step: str, flat: bool) -> None:
    seeded()
    shapes = {"heads": 6, "dim": 24, "value_dim": 20, "padding": 2}
    _, args, named, turned = with_rotation(STEPS[step], TURNS[0], 16, flat, True, **shapes)
    expected = cached_attention(turned, Options())
    known = [*args[:10], args[10].clone(), args[11].clone()]
    actual = getattr(ops, op)(*args, **named)
    assert relative_error(actual, expected) < 1e-5
    ops.torch_cached_rope_attention(*known, **named)
    for mine, theirs in zip(args[10:], known[10:], strict=True):
        assert relative_error(mine[1:].nan_to_num(), theirs[1:].nan_to_num()) < 1e-6


@pytest.mark.drawn
@pytest.mark.parametrize("longest", [2, 40])
@pytest.mark.parametrize("step", ["prefill", "mixed"])
@pytest.mark.parametrize("op", ["triton_cached_rope_attention", "invariant_cached_rope_attention"])
def test_a_captured_step_serves_prompts_of_any_lengths(op: str, step: str, longest: int) -> None:
    seeded()
    shapes = {"heads": 6, "dim": 24, "padding": 3}
    batch, args, named, turned = with_rotation(STEPS[step], TURNS[0], 16, True, **shapes)
    expected = cached_attention(turned, Options())
    real = int(batch.cu_seqlens[-1])
    padded_to_captured(batch, 3, longest)
    actual = getattr(ops, op)(*args[:5], *batch.arguments()[3:], **named)
    assert relative_error(actual[:, :real], expected[:, :real]) < 1e-5


@pytest.mark.drawn
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_in_low_precision(step: str, turns: str) -> None:
    """A whole head turns."""
    seeded()
    shapes = {"heads": 4, "dim": 16, "dtype": torch.bfloat16}
    _, args, further, _ = with_rotation(STEPS[step], turns, 16, True, **shapes)
    twin = [*args[:10], args[10].clone(), args[11].clone()]
    actual = ops.triton_cached_rope_attention(*args, **further)
    expected = ops.torch_cached_rope_attention(*twin, **further)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, expected) < 0.03  # the interpreter cuts numbers off


@pytest.mark.drawn
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_with_scales_of_the_cache(step: str, turns: str) -> None:
    """As the kernels do for what is rotated before: eight-bit floats are the interpreter's own."""
    seeded()
    scales = torch.tensor([0.02, 0.03]), torch.tensor([0.01, 0.02])
    shapes = {"heads": 4, "dim": 16, "cache_dtype": torch.float8_e4m3fn, "scales": scales}
    _, args, further, _ = with_rotation(STEPS[step], turns, 16, False, **shapes)
    named = {"k_scale": scales[0], "v_scale": scales[1]}
    turned = (rotate(x[0], args[3][0], args[4][0], turns)[None].float() for x in args[:2])
    twin = [*turned, *args[2:3], *args[5:10], args[10].clone(), args[11].clone()]
    expected = ops.triton_cached_attention(*twin, **named)
    actual = ops.triton_cached_rope_attention(*args, **named, **further)
    assert relative_error(actual, expected) < 0.02  # ties


def check_mla(row: Row, arguments: list[Any], tolerance: float) -> None:
    table = row.args["block_table"]
    check("cached_rope_mla", arguments, 12, row, tolerance, table[table > 0].long())


@pytest.mark.drawn
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("step", MLA_STEPS)
@pytest.mark.parametrize(("heads", "size"), [(3, 8), (20, 10)])
def test_latent_attention(heads: int, size: int, step: str, turns: str) -> None:
    row = make_step(step)
    arguments = mla(row, heads, 24, 10, scale=0.3)
    table = tables(row.tokens, size, turns)
    check_mla(row, [*arguments[:5], *table, *arguments[5:11], turns, 0.3], 1e-5)


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(20, 32, 16), *HOPPER_SIZES])
def test_latent_attention_in_low_precision(
    heads: int, rank: int, rope: int, turns: str, dtype: torch.dtype
) -> None:
    row = make_row([(1, 1), (1, 150), (1, 64), (1, 97)])
    arguments, table = mla(row, heads, rank, rope, dtype), tables(row.tokens, rope, turns)
    check_mla(row, [*arguments[:5], *table, *arguments[5:11], turns], LOW[dtype])


@pytest.mark.drawn
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("dtype", LOW)
def test_latent_attention_of_many_heads_is_the_same_for_every_number_of_splits(
    dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for launcher in (cached_mla, hopper_mla):
        monkeypatch.setattr(launcher, "MOST_SPLITS", splits)
    row, turns = make_row([(1, 1), (1, 150), (1, 64), (1, 65), (1, 192)]), TURNS[0]
    arguments, table = mla(row, 20, 128, 16, dtype), tables(row.tokens, 16, turns)
    check_mla(row, [*arguments[:5], *table, *arguments[5:11], turns], LOW[dtype])


@pytest.mark.drawn
@pytest.mark.parametrize("turns", [*TURNS, ""])
@pytest.mark.parametrize("sequences", [1, 70])
def test_queries_of_latents(sequences: int, turns: str) -> None:
    """What comes before attention on Hopper GPUs, by one kernel, is what three do elsewhere."""
    row = make_row([(1, 3 + each % 5) for each in range(sequences)])
    q_nope, q_pe, latent, key, weight, *_, slots, _, cache, _ = mla(row, 3, 40, 16)
    rotation = Rotation(*tables(row.tokens, 12, turns), turns) if turns else None
    expected_cache, turned = cache.clone(), (q_pe, key)
    if rotation is not None:
        turned = tuple(
            rotate(x[0], *(each[0] for each in rotation[:2]), turns)[None] for x in turned
        )
    absorbed = absorb_keys(q_nope.double(), weight.double())
    expected = torch.cat((absorbed, turned[0][0].double()), -1)
    new = torch.cat((latent[0].unsqueeze(1), turned[1][0].to(cache.dtype)), -1)
    write_tokens(expected_cache, new, slots, None)
    actual = absorbed_queries(
        q_nope[0], q_pe[0], latent[0], key[0, :, 0], weight, slots, cache, rotation
    )
    assert relative_error(actual, expected) < 1e-6
    assert relative_error(cache, expected_cache) < 1e-6


@pytest.mark.parametrize("longest", [2, 64])
def test_latent_attention_of_a_captured_step(longest: int) -> None:
    row = make_step("mixed")
    arguments, table = mla(row, 20, 24, 10), tables(row.tokens, 10, TURNS[0])
    twin = double([*arguments[:5], *table, *arguments[5:11], TURNS[0]])
    expected = ops.torch_cached_rope_mla(*twin)
    arguments[5:10] = [captured(row, longest)[name] for name in PAGED]
    actual = ops.triton_cached_rope_mla(*arguments[:5], *table, *arguments[5:11], TURNS[0])
    assert relative_error(actual[:, : row.real_tokens], expected[:, : row.real_tokens]) < 1e-5


def test_shapes_under_tracing() -> None:
    for flat in (False, True):
        _, args, named, _ = with_rotation(STEPS["mixed"], TURNS[0], 16, flat, heads=6)
        torch.library.opcheck(
            ops.triton_cached_rope_attention.default,
            tuple(args),
            named,
            test_utils=("test_faketensor",),
        )
