"""Attention that rotates by itself, as kernels. Run by test_triton_kernels.py in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401
from tests.support.ops.naive import (
    Options,
    cached_attention,
    padded_to_captured,
    relative_error,
)
from tests.support.ops.ragged import PAGED, Row, captured, check, double, make_step, mla
from tests.support.ops.ragged import STEPS as MLA_STEPS
from tests.support.ops.rotated import TURNS, rotate, tables, with_rotation
from tests.support.ops.seeds import seeded

ops: Any = torch.ops.onboard
STEPS = {
    "prefill": [(5, 5), (17, 17)],
    "decode": [(1, 1), (1, 9), (1, 130)],
    "mixed": [(1, 20), (7, 7), (1, 16)],
}


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


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("step", MLA_STEPS)
@pytest.mark.parametrize(("heads", "size"), [(3, 8), (20, 10)])
def test_latent_attention(heads: int, size: int, step: str, turns: str) -> None:
    row = make_step(step)
    arguments = mla(row, heads, 24, 10, scale=0.3)
    table = tables(row.tokens, size, turns)
    check_mla(row, [*arguments[:5], *table, *arguments[5:11], turns, 0.3], 1e-5)


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
