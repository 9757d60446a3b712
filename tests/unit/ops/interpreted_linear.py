"""Linears over few tokens. Run by test_triton_kernels.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import random

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.ops.linear import triton_linear as launcher
from tests.support.ops.naive import relative_error

ops = torch.ops.onboard

DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2.5e-2}
SIZES = {"even": (256, 64), "ragged": (2100, 10), "wide": (96, 150)}
AROUND = {
    "nothing": (),
    "bias and residual": ("bias", "residual"),
    "norm": ("norm",),
    "gate": ("gate",),
    "all": ("bias", "residual", "norm", "gate"),
}


def make(
    rows: int, columns: int, outputs: int, around: tuple[str, ...], dtype: torch.dtype
) -> list[object]:
    """Arguments of a fused linear; the input's rows differ in size, so that each needs its own
    norm.
    """
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    gated = "gate" in around
    x = torch.randn(1, rows, columns) * torch.rand(rows, 1) * 5
    weight = torch.randn(2 * outputs if gated else outputs, columns) / columns**0.5
    bias = torch.randn(len(weight)) if "bias" in around else None
    residual = torch.randn(1, rows, outputs) if "residual" in around else None
    norm = torch.randn(columns) if "norm" in around else None
    tensors = [None if t is None else t.to(dtype) for t in (x, weight, bias, residual, norm)]
    return [*tensors, 1e-2, "gelu" if gated else ""]


def double(arguments: list[object]) -> list[object]:
    return [each.double() if isinstance(each, torch.Tensor) else each for each in arguments]


@pytest.mark.drawn
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_fused_linear(rows: int, size: str, around: str) -> None:
    arguments = make(rows, *SIZES[size], AROUND[around], torch.bfloat16)
    actual = ops.triton_fused_linear(*arguments)
    assert actual.dtype == torch.bfloat16
    assert (
        relative_error(actual, ops.torch_fused_linear(*double(arguments))) < DTYPES[torch.bfloat16]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_dtypes(rows: int, dtype: torch.dtype) -> None:
    arguments = make(rows, 200, 50, AROUND["all"], dtype)
    assert (
        relative_error(
            ops.triton_fused_linear(*arguments), ops.torch_fused_linear(*double(arguments))
        )
        < DTYPES[dtype]
    )


def test_slices_of_wider_tensors() -> None:
    arguments = make(3, 64, 16, ("residual",), torch.float32)
    expected = ops.torch_fused_linear(*double(arguments))
    for place in (0, 3):
        each = arguments[place]
        arguments[place] = torch.cat([each, each], -1)[..., : each.shape[-1]]
    assert relative_error(ops.triton_fused_linear(*arguments), expected) < DTYPES[torch.float32]


def test_a_large_float16_input_is_normalised() -> None:
    arguments = make(2, 64, 16, ("norm",), torch.float16)
    # The largest is near the largest float16: times the norm's weight, no float16 holds it.
    arguments[0] = arguments[0] / arguments[0].abs().max() * 60_000
    arguments[4] = arguments[4] * 10
    actual = ops.triton_fused_linear(*arguments)
    assert (
        relative_error(actual, ops.torch_fused_linear(*double(arguments))) < DTYPES[torch.float16]
    )


def test_split_columns_leave_their_counters_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = launcher.Tiles(16, 16, 32, num_warps=1, splits=4)
    monkeypatch.setattr(launcher, "choose_tiles", lambda *_: tiles)
    arguments = make(3, 200, 40, AROUND["bias and residual"], torch.float32)
    first, second = (ops.triton_fused_linear(*arguments) for _ in range(2))
    assert torch.equal(first, second)
    assert relative_error(first, ops.torch_fused_linear(*double(arguments))) < DTYPES[torch.float32]


@pytest.mark.drawn
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("rows", "outputs"), [(65, 48), (140, 48), (70, 1030)])
def test_more_tokens_of_small_weights(rows: int, outputs: int, around: str) -> None:
    """A block of tokens each, of sizes that nothing divides; some of them are the library's."""
    arguments = make(rows, 150, outputs, AROUND[around], torch.float32)
    expected = ops.torch_fused_linear(*double(arguments))
    assert relative_error(ops.triton_fused_linear(*arguments), expected) < DTYPES[torch.float32]


def test_many_tokens_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*_: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(launcher, "launch", no_kernel)
    for around in AROUND.values():
        arguments = make(257, 32, 8, around, torch.float32)
        assert (
            relative_error(
                ops.triton_fused_linear(*arguments), ops.torch_fused_linear(*double(arguments))
            )
            < 1e-6
        )


def test_shapes_under_tracing() -> None:
    for around in AROUND.values():
        arguments = make(2, 32, 8, around, torch.float32)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops.triton_fused_linear.default, tuple(arguments), test_utils=checks)
