"""Rows that are the same, bit for bit, in any company; `test_triton_kernels.py` starts this as a
process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import onboard.ops  # noqa: F401
from onboard.ops.library import op_sources
from onboard.ops.linear.triton_linear import choose_invariant_tiles
from tests.support.ops.naive import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BIG = 8 if DEVICE == "cuda" else 1
ops = torch.ops.onboard


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's products are the library's, whose sums depend on a row's place: with
    float64, too little.
    """
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    matmul = np.matmul
    monkeypatch.setattr(
        np, "matmul", lambda a, b, dtype: matmul(a.astype(float), b.astype(float)).astype(dtype)
    )


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("columns", "outputs"), [(64, 8), (4096, 256), (3072, 1024), (14336, 4096), (4096, 128256)]
)
def test_the_weight_alone_decides_how_a_row_is_summed_up(
    columns: int, outputs: int, dtype: torch.dtype
) -> None:
    numbers, device = (1, 2, 16, 64, 65, 2048), torch.device(DEVICE)
    found = [choose_invariant_tiles(rows, outputs, columns, dtype, device) for rows in numbers]
    assert len({(tiles.columns, tiles.splits * tiles.shares) for tiles in found}) == 1
    assert all(tiles.outputs % 64 == 0 for tiles in found)
    assert all(
        tiles.splits == 1 or tiles.rows >= rows for rows, tiles in zip(numbers, found, strict=True)
    )


@pytest.mark.drawn
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize(("columns", "outputs"), [(96, 40), (2304, 24)])
def test_linear(columns: int, outputs: int, activation: str) -> None:
    """The columns of the wider one are summed up in parts, by several programs or, for many rows,
    by one.
    """
    columns, outputs = columns * BIG, outputs * BIG
    x, weight, norm = randn(1, 130, columns), randn(outputs, columns), 1 + 0.1 * randn(columns)
    residual = randn(1, 130, outputs // (2 if activation else 1))

    def run(rows: slice, op: str = "invariant", dtype: torch.dtype = torch.bfloat16) -> Tensor:
        tensors = [x[:, rows], weight, None, residual[:, rows], norm]
        tensors = [each if each is None else each.to(dtype) for each in tensors]
        return getattr(ops, f"{op}_fused_linear")(*tensors, 1e-6, activation)

    whole = run(slice(0, 130))
    assert relative_error(whole, run(slice(0, 130), "torch", torch.float64)) < 1.5e-2
    for first, count in [(0, 1), (127, 3), (5, 17), (60, 70)]:
        rows = slice(first, first + count)
        assert torch.equal(run(rows), whole[:, rows])


def test_mixture() -> None:
    weights = [randn(4, 48, 40), randn(4, 40, 24)]
    x, selected, routing = randn(37, 40), torch.randint(4, (37, 2), device=DEVICE), randn(37, 2)
    whole = ops.invariant_moe_fused(x, selected, routing, *weights)
    double = [each.double() for each in (x, routing, *weights)]
    assert relative_error(whole, ops.torch_moe_fused(double[0], selected, *double[1:])) < 1.5e-2
    for first, count in [(0, 1), (36, 1), (4, 3), (11, 17)]:
        rows = slice(first, first + count)
        assert torch.equal(
            ops.invariant_moe_fused(x[rows], selected[rows], routing[rows], *weights), whole[rows]
        )


PAGE, PAGES = 8, 12
SCHEDULES = {
    "whole": [{0: 90}, {1: 70}],
    "together": [{0: 90, 1: 70}],
    "in chunks": [{0: 7}, {1: 40, 0: 50}, {0: 33, 1: 30}],
    "decoded": [{0: 87, 1: 68}, {0: 1, 1: 1}, {0: 1}, {1: 1, 0: 1}],
}
"""Steps: how many new tokens each sequence has."""


def attend(tensors: list[Tensor], steps: list[dict[int, int]], **options: object) -> Tensor:
    """Run the steps over pages that are dealt out anew; return what all tokens [2, 90, ...] got."""
    tables = (torch.randperm(2 * PAGES) + 1).view(2, PAGES)
    caches = [torch.full_like(randn(2 * PAGES + 1, 2, PAGE, 16), torch.nan) for _ in range(2)]
    done, out = [0, 0], torch.zeros_like(tensors[0])
    for step in steps:
        spans = {sequence: (done[sequence], done[sequence] + new) for sequence, new in step.items()}
        rows = [
            torch.cat([each[sequence, slice(*span)] for sequence, span in spans.items()])[None]
            for each in tensors
        ]
        starts = torch.tensor([0, *step.values()]).cumsum(0).int()
        lengths = torch.tensor([end for _, end in spans.values()]).int()
        places = [(tables[sequence], torch.arange(*span)) for sequence, span in spans.items()]
        slots = torch.cat([table[place // PAGE] * PAGE + place % PAGE for table, place in places])
        info = torch.tensor(
            [len(step), len(slots), max(step.values()), int(lengths.max()), int(not any(done))]
        ).int()
        metadata = [each.to(DEVICE) for each in (starts, lengths, tables[list(step)].int(), slots)]
        result = ops.invariant_cached_attention(*rows, *metadata, info, *caches, **options)[0]
        for (sequence, span), part in zip(
            spans.items(), result.split(list(step.values())), strict=True
        ):
            out[sequence, slice(*span)] = part
            done[sequence] = span[1]
    assert done == [90, 70]
    return out


def _pairs(*rows: Tensor) -> Callable[[str, slice], Tensor]:
    def run(name: str, part: slice) -> Tensor:
        results = getattr(ops, name)(
            *(each[:, part] for each in rows[:2]), *_fixed(name, rows[2:], part)
        )
        return torch.cat([each.flatten(2) for each in results], dim=-1)

    return run


def _fixed(name: str, tables: tuple[Tensor, ...], part: slice) -> list[object]:
    """What follows q and k: weights of norms, then the tables' rows."""
    norms = [torch.ones(16, device=DEVICE).bfloat16()] * 2 + [1e-6] if "norm" in name else []
    return [*norms, *(each[:, part] for each in tables)]


def _row_wise_kernels() -> dict[str, Callable[[slice], Tensor]]:
    x, y, weight, q, k = (
        randn(1, 7, 64),
        randn(1, 7, 64),
        randn(64),
        randn(1, 7, 4, 16),
        randn(1, 7, 2, 16),
    )
    angles = torch.randn(1, 7, 16, device=DEVICE)
    tables = angles.cos().bfloat16(), angles.sin().bfloat16()
    freqs = torch.polar(torch.ones_like(angles), angles)[..., :8]
    turned = {
        name: _pairs(q, k, *tables) for name in ("rope_cached", "norm_rope", "rope_deinterleaved")
    }
    turned["rope_pairs"] = _pairs(q, k, freqs)
    norms = {
        name: lambda name, part: getattr(ops, name)(x[:, part], weight, 1e-6)
        for name in ("rmsnorm", "wide_rmsnorm")
    }
    sums = {
        name: lambda name, part: torch.cat(
            getattr(ops, name)(x[:, part], y[:, part], weight, 1e-6), dim=-1
        )
        for name in ("fused_add_rmsnorm", "fused_add_wide_rmsnorm")
    }
    others: dict[str, Callable[[str, slice], Tensor]] = {
        "l2norm": lambda name, part: getattr(ops, name)(x[:, part], 1e-6),
        "silu_and_mul": lambda name, part: getattr(ops, name)(x[:, part]),
        "moe_router": lambda name, part: torch.cat(
            [each.double() for each in getattr(ops, name)(x[0, part].float(), 4, True, "softmax")],
            dim=-1,
        )[None],
    }
    made = {**turned, **norms, **sums, **others}
    return {f"triton_{name}": partial(run, f"triton_{name}") for name, run in made.items()}


def test_what_is_declared_to_be_row_wise_computes_a_row_alike_in_any_company() -> None:
    made = _row_wise_kernels()
    kernels = {
        name
        for name, source in op_sources().items()
        if name.startswith("triton_") and source.row_wise
    }
    assert made.keys() == kernels
    for name, run in made.items():
        whole = run(slice(0, 7))
        for first, last in ((0, 1), (6, 7), (2, 5)):
            assert torch.equal(run(slice(first, last)), whole[:, first:last]), name


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 21, "logit_cap": 5.0, "sinks": randn(4)}]
)
def test_attention(options: dict[str, object]) -> None:
    tensors = [randn(2, 90, heads, 16) for heads in (4, 2, 2)]
    outputs = {name: attend(tensors, steps, **options) for name, steps in SCHEDULES.items()}
    expected = ops.torch_attention(*(each[:1].double() for each in tensors), **options)
    assert relative_error(outputs["whole"][:1], expected) < 1.5e-2
    for output in outputs.values():
        assert torch.equal(output, outputs["whole"])
