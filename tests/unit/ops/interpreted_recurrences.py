"""The Triton kernels of recurrences that only some models have, and of latent attention to chosen
keys, against float64; `test_triton_kernels.py` starts this in the interpreter.

On a GPU the same tests run as they are (`tests/gpu/test_mixer_kernels.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.delta_rule import triton_cached_delta_rule as cached_delta_rule
from onboard.ops.recurrences import triton_cached_channels as cached_channels
from onboard.ops.recurrences import triton_cached_mlstm as cached_mlstm
from onboard.ops.sparse import triton_cached_sparse_mla as sparse
from onboard.ops.ssm import triton_cached_ssm as cached_ssm
from tests.support.ops.chosen_latents import sparse_mla
from tests.support.ops.ragged import DEVICE, STEPS, Row, check, make_row, make_step
from tests.support.ops.recurrent import kda, lightning, linear_recurrence, mlstm, token_shift, wkv

LOW = {torch.bfloat16: 2.5e-2} if DEVICE == "cpu" else {torch.float16: 4e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences shall cross the borders of chunks, too."""
    for launcher in (cached_delta_rule, cached_mlstm, cached_ssm):
        monkeypatch.setattr(launcher, "CHUNK", 16)
    monkeypatch.setattr(cached_channels, "CHUNK", 8)
    for width in ("CHANNELS", "STEP_CHANNELS"):
        monkeypatch.setattr(cached_channels, width, 4)


def check_state(
    name: str, row: Row, arguments: list[Any], cache: int, tolerance: float = 1e-5
) -> None:
    check(name, arguments, cache, row, tolerance, row.slots)


@pytest.mark.parametrize(
    ("step", "heads", "key", "value", "normalise"),
    [("prefill", 1, 16, 8, True), ("chunked prefill", 1, 5, 20, False),
     ("decode", 2, 5, 20, False), ("mixed", 2, 5, 8, True)],
)  # fmt: skip
def test_kda(step: str, heads: int, key: int, value: int, normalise: bool) -> None:
    row = make_step(step)
    check_state("cached_kda", row, kda(row, heads, key, value, normalise), 9)


@pytest.mark.parametrize("dtype", LOW)
def test_kda_in_low_precision(dtype: torch.dtype) -> None:
    row = make_row([(9, 9), (1, 4)])
    check_state("cached_kda", row, kda(row, 1, 16, 8, True, dtype), 9, LOW[dtype])


@pytest.mark.parametrize("strength", [0.05, 40.0])
def test_blocks_of_a_chunk_see_each_other_however_fast_channels_forget(
    strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse of what a chunk forgets is far beyond what float32 holds."""
    monkeypatch.setattr(cached_delta_rule, "CHUNK", 32)
    row = make_row([(70, 75)])
    check_state("cached_kda", row, kda(row, 1, 6, 4, True, strength=strength), 9)


@pytest.mark.parametrize("step", STEPS)
def test_lightning_attention(step: str) -> None:
    row = make_step(step)
    check_state("cached_lightning_attention", row, lightning(row, 3, 6, 5), 8)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_lightning_attention_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state("cached_lightning_attention", row, lightning(row, 2, 16, 8, dtype), 8, LOW[dtype])


def test_lightning_attention_with_all_chunks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LONG_QUERY", 5), ("LONG_CHUNK", 16), ("SHARE_BUSY", 1000)):
        monkeypatch.setattr(cached_ssm, name, value)
    row = make_step("chunked prefill")
    check_state("cached_lightning_attention", row, lightning(row, 3, 6, 5), 8)


@pytest.mark.parametrize("step", STEPS)
def test_linear_recurrence(step: str) -> None:
    row = make_step(step)
    check_state("cached_linear_recurrence", row, linear_recurrence(row, 6), 6)


@pytest.mark.parametrize("dtype", LOW)
def test_linear_recurrence_in_low_precision(dtype: torch.dtype) -> None:
    row = make_row([(9, 9), (1, 4)])
    check_state("cached_linear_recurrence", row, linear_recurrence(row, 3, dtype), 6, LOW[dtype])


@pytest.mark.parametrize(("step", "strength"), zip(STEPS, (1.0, 80.0, 80.0, 1.0), strict=True))
def test_wkv(step: str, strength: float) -> None:
    """Powers of keys are far beyond what float32 holds, and keys themselves have a few digits less."""
    row, tolerance = make_step(step), 1e-5 if strength == 1.0 else 2e-4
    check_state("cached_wkv", row, wkv(row, 6, strength=strength), 8, tolerance)


@pytest.mark.parametrize("dtype", LOW)
def test_wkv_in_low_precision(dtype: torch.dtype) -> None:
    row = make_row([(9, 9), (1, 4)])
    check_state("cached_wkv", row, wkv(row, 3, dtype), 8, LOW[dtype])


@pytest.mark.parametrize(("step", "dtype"), zip(STEPS, [torch.float32, *LOW] * 2, strict=False))
def test_token_shift(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state("cached_token_shift", row, token_shift(row, 6, dtype), 5, 1e-6)


@pytest.mark.parametrize(("step", "strength"), zip(STEPS, (1.0, 30.0, 30.0, 1.0), strict=True))
def test_mlstm(step: str, strength: float) -> None:
    """Powers of gates are far beyond what float32 holds."""
    eps, tolerance = (1e-6, 1e-5) if strength == 1.0 else (0.3, 2e-4)
    row = make_step(step)
    arguments = mlstm(row, 2, 6, 5, strength=strength, eps=eps)
    check_state("cached_mlstm", row, arguments, 9, tolerance)


@pytest.mark.parametrize("dtype", LOW)
def test_mlstm_in_low_precision(dtype: torch.dtype) -> None:
    row = make_row([(9, 9), (1, 4)])
    check_state("cached_mlstm", row, mlstm(row, 2, 16, 8, dtype), 9, LOW[dtype])


def check_sparse(row: Row, arguments: list[Any], tolerance: float = 1e-5) -> None:
    table = row.args["block_table"]
    # Page 0 is everyone's
    check("cached_sparse_mla", arguments, 11, row, tolerance, table[table > 0].long())


@pytest.mark.parametrize(
    ("step", "heads", "top_k", "window", "sinks"),
    [("prefill", 3, 4, None, True), ("chunked prefill", 20, 9, 6, False), ("mixed", 2, 0, 5, True),
     ("decode", 3, 40, None, True), ("decode", 20, 6, 9, False), ("decode", 2, 0, 3, True)],
)  # fmt: skip
def test_latent_attention_to_chosen_keys(
    step: str, heads: int, top_k: int, window: int | None, sinks: bool
) -> None:
    row = make_step(step)
    check_sparse(row, sparse_mla(row, heads, 24, 10, top_k, window, sinks=sinks))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_latent_attention_to_chosen_keys_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_sparse(row, sparse_mla(row, 16, 32, 8, 7, None, dtype), LOW[dtype])


@pytest.mark.parametrize("sinks", [False, True])
def test_chosen_keys_are_shared_out(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a share has none of a short sequence."""
    monkeypatch.setattr(sparse, "processors", lambda device: 48)
    row = make_row([(1, 1), (1, 150), (1, 64)])
    check_sparse(row, sparse_mla(row, 4, 16, 4, 70, sinks=sinks))
    check_sparse(row, sparse_mla(row, 4, 16, 4, 0, 40, sinks=sinks))
