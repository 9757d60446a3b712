"""The Triton kernels of cached mixers against float64; `test_triton_kernels.py` starts this in the
interpreter.

On a GPU the same tests run as they are (`tests/gpu/test_mixer_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onboard.ops  # noqa: F401
from onboard.errors import UsageError
from onboard.ops.delta_rule import triton_cached_delta_rule as cached_delta_rule
from onboard.ops.delta_rule.fla_delta_rule import has_fla
from onboard.ops.latent_attention import triton_cached_mla as cached_mla
from onboard.ops.library import op_sources
from onboard.ops.ssm import triton_cached_ssm as cached_ssm
from tests.support.ops import ragged
from tests.support.ops.chosen_latents import sparse_mla
from tests.support.ops.naive import relative_error
from tests.support.ops.ragged import (
    DEVICE,
    HOPPER_SIZES,
    PAGED,
    STEPS,
    Row,
    captured,
    check,
    conv,
    delta_rule,
    double,
    make_row,
    make_step,
    mla,
    randn,
    selective_scan,
    slots,
    ssm,
)
from tests.support.ops.recurrent import kda, lightning, linear_recurrence, mlstm, token_shift, wkv

ops: Any = torch.ops.onboard
LOW = {torch.bfloat16: 2.5e-2} if DEVICE == "cpu" else {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences shall cross the borders of chunks, too."""
    for launcher in (cached_delta_rule, cached_ssm):
        monkeypatch.setattr(launcher, "CHUNK", 16)


def test_every_kernel_with_a_cache_is_tested_on_spoiled_ones() -> None:
    texts = "".join(
        Path(__file__).with_name(f"interpreted_{part}.py").read_text()
        for part in ("kernels", "mixers", "recurrences", "rope_attention")
    )
    names = [
        name
        for name, source in op_sources().items()
        if source.mutates and name.startswith("triton_")
    ]
    assert names
    assert all(
        f'"{name}"' in texts or f'"{name.removeprefix("triton_")}"' in texts for name in names
    ), names


def check_mla(row: Row, arguments: list[Any], tolerance: float) -> None:
    table = row.args["block_table"]
    # Page 0 is everyone's
    check("cached_mla", arguments, 10, row, tolerance, table[table > 0].long())


@pytest.mark.drawn
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(1, 16, 4), (3, 24, 10), (20, 32, 16)])
def test_mla(step: str, heads: int, rank: int, rope: int) -> None:
    row = make_step(step)
    check_mla(row, mla(row, heads, rank, rope, scale=0.3), 1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_mla_with_a_scale_of_its_cache(step: str) -> None:
    row = make_step(step)
    check_mla(row, [*mla(row, 4, 32, 8, scale=0.3), torch.tensor([0.37], device=DEVICE)], 1e-5)


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(16, 32, 8), *HOPPER_SIZES])
def test_mla_in_low_precision(
    heads: int, rank: int, rope: int, step: str, dtype: torch.dtype
) -> None:
    row = make_step(step)
    check_mla(row, mla(row, heads, rank, rope, dtype), LOW[dtype])


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_mla_is_the_same_for_every_number_of_splits(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_mla, "MOST_SPLITS", splits)
    row = make_row([(1, 1), (1, 150), (1, 64)])
    check_mla(row, mla(row, 4, 16, 4), 1e-5)


@pytest.mark.parametrize("lengths", [[(1, 1), (1, 150), (1, 64)], [(7, 70), (1, 9)]])
def test_mla_with_pages_that_hold_whole_tiles(
    lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "PAGE", 64)
    row = make_row(lengths)
    check_mla(row, mla(row, 20, 32, 8, torch.bfloat16), LOW[torch.bfloat16])


@pytest.mark.drawn
@pytest.mark.parametrize("longest", [2, 64])
@pytest.mark.parametrize("step", ["prefill", "chunked prefill", "mixed"])
@pytest.mark.parametrize("heads", [3, 20])
def test_mla_of_a_captured_step_serves_any_lengths(heads: int, step: str, longest: int) -> None:
    """What the host knows of the step that was captured must not decide the result."""
    row = make_step(step)
    arguments = mla(row, heads, 32, 16)
    expected = ops.torch_cached_mla(*double(arguments))
    arguments[5:10] = [captured(row, longest)[name] for name in PAGED]
    actual = ops.triton_cached_mla(*arguments)
    assert relative_error(actual[:, : row.real_tokens], expected[:, : row.real_tokens]) < 1e-5


def test_mla_reads_lengths_on_the_device_only() -> None:
    row = make_row([(1, 3), (1, 90)])
    row.args["batch_info_host"][3] = 1
    arguments = mla(row, 4, 16, 4)
    wide = double(arguments)
    wide[9] = torch.tensor([2, 2, 1, 90], dtype=torch.int32)
    assert relative_error(ops.triton_cached_mla(*arguments), ops.torch_cached_mla(*wide)) < 1e-5


def check_state(
    name: str, row: Row, arguments: list[Any], cache: int, tolerance: float = 1e-5
) -> None:
    check(name, arguments, cache, row, tolerance, row.slots)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("channels", "kernel", "dilation", "activation"),
    [(70, 4, 1, "silu"), (5, 3, 2, None), (33, 2, 1, "gelu"), (8, 1, 1, None)],
)
def test_causal_conv(
    step: str, channels: int, kernel: int, dilation: int, activation: str | None
) -> None:
    row = make_step(step)
    arguments = conv(row, channels, kernel, dilation, activation, bias=channels != 33)
    check_state("cached_causal_conv1d", row, arguments, 7)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_causal_conv_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state(
        "cached_causal_conv1d", row, conv(row, 20, 4, 1, "silu", dtype=dtype), 7, LOW[dtype]
    )


def test_causal_conv_refuses_what_it_does_not_know() -> None:
    arguments = conv(make_step("decode"), 8, 4, 1, "mish")
    with pytest.raises(UsageError, match="no activation 'mish'"):
        ops.triton_cached_causal_conv1d(*arguments)
    with pytest.raises(UsageError, match="2 groups of 8 channels"):
        ops.triton_cached_causal_conv1d(*arguments[:-2], 2, None)


DELTA_SIZES = [(2, 4, 16, 8, True), (1, 3, 5, 20, False)]


@pytest.mark.drawn
@pytest.mark.parametrize(("key_heads", "heads", "key", "value", "normalise"), DELTA_SIZES)
@pytest.mark.parametrize("step", STEPS)
def test_gated_delta_rule(
    step: str, key_heads: int, heads: int, key: int, value: int, normalise: bool
) -> None:
    row = make_step(step)
    arguments = delta_rule(row, key_heads, heads, key, value, normalise)
    check_state("cached_gated_delta_rule", row, arguments, 9)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_gated_delta_rule_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state(
        "cached_gated_delta_rule", row, delta_rule(row, 2, 4, 16, 8, True, dtype), 9, LOW[dtype]
    )


@pytest.mark.skipif(
    DEVICE == "cpu" or not has_fla(), reason="needs a CUDA device, and flash-linear-attention"
)
@pytest.mark.parametrize("step", STEPS)
def test_gated_delta_rule_of_another_library(step: str) -> None:
    row = make_step(step)
    arguments = delta_rule(row, 2, 4, 64, 32, True, torch.bfloat16)
    check("cached_gated_delta_rule", arguments, 9, row, LOW[torch.bfloat16], row.slots, "fla")


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_delta_rule_without_decay(step: str) -> None:
    row = make_step(step)
    q, k, v, _, *rest = delta_rule(row, 1, 2, 5, 6, True)
    check_state("cached_delta_rule", row, [q, k, v, *rest], 8)


def test_sixteen_heads_share_one() -> None:
    row = make_row([(1, 9)])
    check_state("cached_gated_delta_rule", row, delta_rule(row, 1, 16, 8, 3, True), 9)
    check_state("cached_ssm", row, ssm(row, 16, 1, 3, 4), 11)


def test_a_chunk_of_equal_keys_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's powers would overflow what float32 can hold apart, its inverse does not."""
    monkeypatch.setattr(cached_delta_rule, "CHUNK", 64)
    row = make_row([(70, 70)])
    arguments = delta_rule(row, 1, 1, 8, 8, True)
    arguments = [each.bfloat16() if index < 5 else each for index, each in enumerate(arguments)]
    arguments[1] = arguments[1][:, :1].expand_as(arguments[1]).contiguous()
    arguments[3], arguments[4] = torch.zeros_like(arguments[3]), torch.ones_like(arguments[4])
    check_state("cached_gated_delta_rule", row, arguments, 9, 1e-2)


@pytest.mark.drawn
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "groups", "size", "state"), [(4, 2, 8, 16), (3, 1, 5, 20)])
def test_ssm(step: str, heads: int, groups: int, size: int, state: int) -> None:
    row = make_step(step)
    check_state("cached_ssm", row, ssm(row, heads, groups, size, state), 11)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_ssm_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state("cached_ssm", row, ssm(row, 4, 1, 8, 16, dtype), 11, LOW[dtype])


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize(("heads", "groups", "size", "state"), [(6, 2, 12, 16), (3, 1, 5, 20)])
def test_ssm_from_head_to_head(
    step: str, heads: int, groups: int, size: int, state: int, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cached_ssm, "WARPS_BUSY", 0)
    monkeypatch.setattr(cached_ssm, "WARP_ELEMENTS", 128)
    row = make_step(step)
    arguments = ssm(row, heads, groups, size, state)
    arguments[11] = arguments[11].to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-8
    check_state("cached_ssm", row, arguments, 11, tolerance)


@pytest.mark.drawn
@pytest.mark.parametrize("chunks", ["one by one", "at once"])
@pytest.mark.parametrize("step", STEPS)
def test_ssm_with_states_of_16_bits(
    step: str, chunks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are those of float32 as far as the states are; what is kept is rounded once."""
    monkeypatch.setattr(cached_ssm, "LONG_QUERY", 5)
    monkeypatch.setattr(cached_ssm, "SHARE_BUSY", 1000 if chunks == "at once" else 0)
    row = make_step(step)
    arguments = ssm(row, 4, 2, 8, 16)
    arguments[11] = arguments[11].bfloat16()
    check_state("cached_ssm", row, arguments, 11, 2.0**-8)
    assert arguments[11].dtype == torch.bfloat16


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", ["prefill", "chunked prefill", "mixed"])
def test_ssm_with_all_chunks_at_once(
    step: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_ssm, "LONG_QUERY", 5)
    monkeypatch.setattr(cached_ssm, "LONG_CHUNK", 16)
    monkeypatch.setattr(cached_ssm, "SHARE_BUSY", 1000)
    row = make_step(step)
    tolerance = 1e-5 if dtype == torch.float32 else LOW[dtype]
    check_state("cached_ssm", row, ssm(row, 4, 2, 24, 20, dtype), 11, tolerance)


@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_replayed_ssm(step: str) -> None:
    row, kept = make_step(step), 3
    arguments = ssm(row, 4, 2, 8, 16)
    row.spoil(arguments[11], paged=False)
    begins = torch.zeros(len(arguments[11]), 1, dtype=torch.int64, device=DEVICE)
    start = row.args["kv_lens"] - row.args["cu_seqlens"].diff()
    begins[row.args["state_slots"], 0] = (
        (start - torch.randint_like(start, kept + 1)).clamp(min=0).long()
    )
    arguments[12:12] = [slots(kept, 4, 8), slots(kept, 2, 16), slots(kept, 4), begins]
    theirs = double(
        [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
    )
    names = ("triton_replayed_ssm", "torch_replayed_ssm")
    actual, expected = (
        getattr(ops, name)(*each) for name, each in zip(names, (arguments, theirs), strict=True)
    )
    assert relative_error(actual[:, : row.real_tokens], expected[:, : row.real_tokens]) < 1e-5
    for ours, wanted in zip(arguments[11:16], theirs[11:16], strict=True):
        assert relative_error(ours[row.slots], wanted[row.slots]) < 1e-5


@pytest.mark.drawn
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("channels", "state", "optional"), [(70, 16, True), (9, 5, False)])
def test_selective_scan(step: str, channels: int, state: int, optional: bool) -> None:
    row = make_step(step)
    check_state("cached_selective_scan", row, selective_scan(row, channels, state, optional), 12)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_selective_scan_in_low_precision(step: str, dtype: torch.dtype) -> None:
    row = make_step(step)
    check_state(
        "cached_selective_scan", row, selective_scan(row, 9, 16, True, dtype), 12, LOW[dtype]
    )


CAPTURED: dict[str, tuple[Callable[[Row], list[Any]], int]] = {
    "cached_mla": (lambda row: mla(row, 16, 32, 8), 10),
    "cached_causal_conv1d": (lambda row: conv(row, 20, 4, 1, "silu"), 7),
    "cached_gated_delta_rule": (lambda row: delta_rule(row, 2, 4, 16, 8, True), 9),
    "cached_ssm": (lambda row: ssm(row, 4, 2, 8, 16), 11),
    "cached_selective_scan": (lambda row: selective_scan(row, 9, 16, True), 12),
    "cached_kda": (lambda row: kda(row, 2, 16, 8, True), 9),
    "cached_lightning_attention": (lambda row: lightning(row, 4, 16, 8), 8),
    "cached_linear_recurrence": (lambda row: linear_recurrence(row, 9), 6),
    "cached_wkv": (lambda row: wkv(row, 9), 8),
    "cached_mlstm": (lambda row: mlstm(row, 2, 16, 8), 9),
    "cached_sparse_mla": (lambda row: sparse_mla(row, 16, 32, 8, 0, 9), 11),
    "cached_token_shift": (lambda row: token_shift(row, 9), 5),
}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_decode_follows_the_lengths(name: str) -> None:
    """Captured as sequences that begin, replayed as ones that go on, and with other slots."""
    make, cache = CAPTURED[name]
    row, later = make_row([(1, 1)] * 3, 2), make_row([(1, 7), (1, 30), (1, 1)], 2)
    columns = later.args["block_table"].shape[1]
    row.args["block_table"] = torch.zeros_like(later.args["block_table"])
    arguments = make(row)
    if "mla" in name:
        arguments[cache] = randn(max(row.pages, later.pages), *arguments[cache].shape[1:])
    op = getattr(ops, f"triton_{name}")
    op(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*arguments)
    for field, value in later.args.items():
        row.args[field].copy_(value)
    assert row.args["block_table"].shape[1] == columns
    wide = [
        each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in arguments
    ]
    wide[cache] = arguments[cache].double()
    expected = getattr(ops, f"torch_{name}")(*wide)
    graph.replay()
    assert relative_error(out[:, :3], expected[:, :3]) < 1e-5


REAL_SIZES: dict[str, Callable[[Row, torch.dtype], list[Any]]] = {
    "cached_mla": lambda row, dtype: mla(row, 128, 512, 64, dtype),
    "cached_causal_conv1d": lambda row, dtype: conv(row, 8192, 4, 1, "silu", dtype=dtype),
    "cached_gated_delta_rule": lambda row, dtype: delta_rule(row, 16, 32, 128, 128, True, dtype),
    "cached_ssm": lambda row, dtype: ssm(row, 80, 1, 64, 128, dtype),
    "cached_selective_scan": lambda row, dtype: selective_scan(row, 8192, 16, True, dtype),
    "cached_kda": lambda row, dtype: kda(row, 32, 128, 128, True, dtype),
    "cached_lightning_attention": lambda row, dtype: lightning(row, 64, 128, 128, dtype),
    "cached_linear_recurrence": lambda row, dtype: linear_recurrence(row, 4096, dtype),
    "cached_wkv": lambda row, dtype: wkv(row, 4096, dtype),
    "cached_mlstm": lambda row, dtype: mlstm(row, 8, 256, 512, dtype),
    "cached_sparse_mla": lambda row, dtype: sparse_mla(row, 128, 512, 64, 70, None, dtype, False),
    "cached_token_shift": lambda row, dtype: token_shift(row, 4096, dtype),
}


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(1, 500), (1, 1), (1, 33)], [(200, 200), (1, 90), (64, 300)]])
@pytest.mark.parametrize("name", REAL_SIZES)
def test_the_sizes_of_real_models(
    name: str, lengths: list[tuple[int, int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for launcher in (cached_delta_rule, cached_ssm):
        monkeypatch.setattr(launcher, "CHUNK", 64)
    row = make_row(lengths)
    used = row.args["block_table"].flatten().long() if "mla" in name else row.slots
    arguments = REAL_SIZES[name](row, dtype)
    check(name, arguments, CAPTURED[name][1], row, 2e-5 if dtype == torch.float32 else 1.5e-2, used)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("group", [24, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_rmsnorm(dtype: torch.dtype, group: int, first: bool) -> None:
    x, wide = torch.randn(1, 5, 24, device=DEVICE).to(dtype), torch.randn(1, 5, 60, device=DEVICE)
    weight, gate = torch.randn(24, device=DEVICE), wide[..., 20:44]
    actual = ops.triton_fused_rmsnorm_gated(x, weight, gate, 1e-5, group, first, torch.bfloat16)
    assert actual.dtype == torch.bfloat16
    expected = ops.torch_rmsnorm_gated(
        x.double(), weight.double(), gate.double(), 1e-5, group, first
    )
    assert relative_error(actual, expected) < 1.2e-2
    plain = ops.triton_fused_rmsnorm_gated(
        x.float(), weight, None, 1e-5, group, first, torch.float32
    )
    expected = ops.torch_rmsnorm_gated(x.double(), weight.double(), None, 1e-5, group, first)
    assert relative_error(plain, expected) < 1e-6


REPEATED = {
    "cached_ssm": (lambda row: ssm(row, 8, 1, 16, 16), 11),
    "cached_gated_delta_rule": (lambda row: delta_rule(row, 2, 4, 16, 16, True), 9),
    "cached_causal_conv1d": (lambda row: conv(row, 24, 4, 1, "silu"), 7),
}


@pytest.mark.parametrize("name", REPEATED)
def test_steps_may_follow_each_other_at_once(name: str) -> None:
    """A kernel may start before the one in front has ended; the state that it reads is the last one
    all the same.
    """
    make, cache = REPEATED[name]
    row = make_row([(1, 5), (1, 66), (1, 9)])
    arguments = make(row)
    theirs = double(arguments)
    steps = 30 if DEVICE == "cuda" else 3
    outputs = [getattr(ops, f"triton_{name}")(*arguments) for _ in range(steps)]
    expected = [getattr(ops, f"torch_{name}")(*theirs) for _ in range(steps)]
    for actual, wanted in zip(outputs, expected, strict=True):
        assert relative_error(actual, wanted) < 1e-5
    assert relative_error(arguments[cache][row.slots], theirs[cache][row.slots]) < 1e-5
