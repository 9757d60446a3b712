from __future__ import annotations

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.attention.cached_attention import as_stored
from tests.support.ops.float8 import exact_and_bound
from tests.support.ops.naive import make_batch

STEPS = {
    "prefill": [(5, 5), (1, 1), (17, 17)],
    "decode": [(1, 1), (1, 8), (1, 9), (1, 70)],
    "mixed": [(1, 20), (7, 7), (4, 11), (1, 16)],
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("size", [0.02, 1.0])
def test_attention_is_as_near_as_the_format_allows(step: str, size: float) -> None:
    batch = make_batch(STEPS[step], cache_dtype=torch.float8_e4m3fn)
    batch.query *= size
    for sequence in batch.sequences:
        sequence.query *= size
    expected, bound = exact_and_bound(batch)
    error = (torch.ops.onboard.torch_cached_attention(*batch.arguments()).double() - expected).abs()
    assert (error <= bound + 1e-6).all()
    assert error.max() > 1e-3  # it is this format, not a finer one


def test_what_the_format_cannot_hold_becomes_its_largest_number() -> None:
    values = torch.tensor([1e4, -1e4, 448.0, 449.0, 0.0, torch.inf, 2**-9])
    stored = as_stored(values, torch.float8_e4m3fn).float()
    assert stored.tolist() == [448, -448, 448, 448, 0, 448, 2**-9]
    assert as_stored(torch.tensor([torch.nan]), torch.float8_e4m3fn).float().isnan().all()
