"""The Triton kernels of cached mixers against float64; `test_triton_kernels.py` starts this in the interpreter.

On a GPU the same tests run as they are (`tests/gpu/test_mixer_kernels.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive import relative_error
from ragged import PAGE, STEPS, Row, check, make_row, make_step, randn

import onboard.ops  # noqa: F401
from onboard.ops.triton import cached_mla

ops: Any = torch.ops.onboard
PAGED = ("cu_seqlens", "kv_lens", "block_table", "slot_mapping", "batch_info_host")
STATE = ("cu_seqlens", "kv_lens", "state_slots", "batch_info_host")
LOW = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def mla(row: Row, heads: int, rank: int, rope: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """Arguments of a cached latent attention."""
    nope, value = 6, 7
    tokens = [randn(1, row.tokens, *shape, dtype=dtype) for shape in [(heads, nope), (heads, rope), (rank,), (1, rope)]]
    weight = (randn(heads * (nope + value), rank) * rank**-0.5).to(dtype)
    cache = randn(row.pages, 1, PAGE, rank + rope, dtype=options.get("cache_dtype", dtype))
    return [*tokens, weight, *row.metadata(*PAGED), cache, options.get("scale")]


def check_mla(row: Row, arguments: list[Any], tolerance: float) -> None:
    check("cached_mla", arguments, 10, row, tolerance, row.args["block_table"].flatten().long())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(1, 16, 4), (3, 24, 10), (20, 32, 16)])
def test_mla(step: str, heads: int, rank: int, rope: int) -> None:
    row = make_step(step)
    check_mla(row, mla(row, heads, rank, rope, scale=0.3), 1e-5)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_mla_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_mla(row, mla(row, 16, 32, 8, dtype), LOW[dtype])


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_mla_is_the_same_for_every_number_of_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_mla, "MOST_SPLITS", splits)
    row = make_row([(1, 1), (1, 150), (1, 64)])
    check_mla(row, mla(row, 4, 16, 4), 1e-5)


def test_mla_reads_lengths_on_the_device_only() -> None:
    row = make_row([(1, 3), (1, 90)])
    row.args["batch_info_host"][3] = 1
    arguments = mla(row, 4, 16, 4)
    wide = [each.double() if each.is_floating_point() else each for each in arguments[:-1]]
    wide[9] = torch.tensor([2, 2, 1, 90], dtype=torch.int32)
    assert relative_error(ops.triton_cached_mla(*arguments), ops.torch_cached_mla(*wide)) < 1e-5
