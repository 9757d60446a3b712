"""The kernels that choose tokens against the torch function; `test_triton_kernels.py` starts this in the
interpreter.

On a GPU the same tests run as they are (`tests/gpu/test_sampling_gpu.py`).
"""

from __future__ import annotations

import pytest
import torch

from onboard.ops.sampling import triton_sampling as sampling
from onboard.ops.sampling.sampling import NOT_A_TOKEN, choose_tokens
from onboard.ops.triton import host_copy
from tests.support.ops.ragged import DEVICE

FILTERS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.3, 0, 1.0, 0.0),
    "top-k": (0.8, 3, 1.0, 0.0),
    "top-k of one": (1.0, 1, 1.0, 0.0),
    "top-k of all": (1.0, 10**6, 1.0, 0.0),
    "top-p": (1.0, 0, 0.7, 0.0),
    "top-p of one": (2.0, 0, 1e-6, 0.0),
    "min-p": (1.5, 0, 1.0, 0.2),
    "all": (1.7, 9, 0.8, 0.05),
}


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows shall cross the borders of parts, too."""
    monkeypatch.setattr(sampling, "CHUNK", 64)
    monkeypatch.setattr(sampling, "BLOCK", 64)


def _choose(
    logits: torch.Tensor, rows: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' tokens, and what they kept for slots 1, 2 and so on."""
    count = len(logits)
    latest, landed = (
        torch.zeros(size, dtype=torch.int64, device=DEVICE) for size in (count + 1, (count + 1, 2))
    )
    slots, lengths = (
        torch.arange(1, count + 1, device=DEVICE),
        torch.randint(1, 100, (count,), dtype=torch.int32),
    )
    arguments = (each.to(DEVICE) for each in (*rows.T.contiguous(), uniform))
    tokens = sampling.choose_and_keep(
        logits.to(DEVICE), *arguments, latest, landed, slots, lengths.to(DEVICE)
    )
    assert torch.equal(landed.cpu()[slots.cpu(), lengths % 2], tokens.cpu())
    assert not landed.cpu()[slots.cpu(), 1 - lengths % 2].any()
    return tokens.cpu(), latest[1:].cpu()


@pytest.mark.parametrize(
    ("filters", "kept"), [((1.0, 0, 0.5, 0.0), 2), ((1.0, 2, 1.0, 0.0), 2), ((1.0, 0, 1.0, 1.0), 4)]
)
def test_of_equals_on_the_border_the_first_are_kept(filters: tuple[float, ...], kept: int) -> None:
    rows, uniform = torch.tensor([filters] * 12), torch.arange(12, dtype=torch.float64) / 12
    tokens, _ = _choose(torch.zeros(12, 4), rows, uniform)
    assert sorted(set(tokens.tolist())) == list(range(kept))


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "rounded"), [(40, torch.float32, False), (150, torch.bfloat16, True)]
)
def test_the_tokens_of_the_torch_function(
    vocabulary: int, dtype: torch.dtype, rounded: bool
) -> None:
    """One row a filter; among logits that are rounded are many equals."""
    rows = torch.tensor(list(FILTERS.values()), dtype=torch.float32)
    logits = torch.randn(len(rows), vocabulary) * 2
    logits = (logits.round() if rounded else logits).to(dtype)
    logits[:, 3] = -torch.inf
    uniform = torch.rand(len(rows), dtype=torch.float64)
    expected = choose_tokens(logits, *rows.T, uniform)
    tokens, latest = _choose(logits, rows, uniform)
    assert dict(zip(FILTERS, tokens.tolist(), strict=True)) == dict(
        zip(FILTERS, expected.tolist(), strict=True)
    )
    assert torch.equal(tokens, latest)


def test_numbers_at_the_ends_choose_tokens_that_are_kept() -> None:
    rows = torch.tensor([FILTERS["top-k"], FILTERS["plain"]] * 2, dtype=torch.float32)
    logits = torch.randn(4, 70)
    logits[:, 0] = logits[:, 69] = -torch.inf
    tokens, _ = _choose(
        logits, rows, torch.tensor([0.0, 0.0, 1 - 2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    )
    best = logits.topk(3).indices.sort().values
    assert tokens.tolist() == [best[0, 0], 1, best[2, 2], 68]


def test_logits_that_are_not_finite_choose_no_token() -> None:
    logits = torch.randn(4, 70)
    logits[1, 65], logits[2, 3] = torch.nan, torch.inf
    tokens, latest = _choose(
        logits, torch.tensor([FILTERS["plain"]] * 4), torch.rand(4, dtype=torch.float64)
    )
    assert [token == NOT_A_TOKEN for token in tokens.tolist()] == [False, True, True, False]
    assert latest[1] == latest[2] == 0


def test_latest_tokens_are_filled_in() -> None:
    ids, latest = torch.tensor([[5, -2, 0, -1, 9]]), torch.tensor([10, 11, 12])
    assert sampling.fill(ids.to(DEVICE), latest.to(DEVICE)).tolist() == [[5, 12, 0, 11, 9]]


@pytest.mark.parametrize("count", [1, 512, 1300])
def test_numbers_are_copied_up_to_the_last(count: int) -> None:
    """On a GPU the source is memory of the host."""
    source = torch.randint(-(2**62), 2**62, (1300,))
    target = torch.zeros(1300, dtype=torch.int64, device=DEVICE)
    host_copy.copy(target[:count], (source.pin_memory() if target.is_cuda else source)[:count])
    assert torch.equal(target[:count].cpu(), source[:count])
    assert not target[count:].any()


def test_rows_are_copied_up_to_their_widths() -> None:
    """On a GPU the source and the widths are memory of the host."""
    widths = torch.tensor([0, 1, 512, 700, 1300], dtype=torch.int32)
    source = torch.randint(-(2**30), 2**30, (5, 1300), dtype=torch.int32)
    target = torch.zeros(5, 1300, dtype=torch.int32, device=DEVICE)
    host_copy.copy_rows(
        target, *(each.pin_memory() if target.is_cuda else each for each in (source, widths))
    )
    inside = torch.arange(1300) < widths[:, None]
    assert torch.equal(target.cpu(), source.where(inside, 0))
