"""The Triton ops on a GPU, at the sizes of real models, against the references in float64; `-s`
shows timings.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import onboard.ops  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ops = torch.ops.onboard

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PAGE = 32


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed = random.randrange(2**31)
    torch.manual_seed(seed)
    print(f"seed {seed}")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.double() - expected.double()
    return (difference.square().mean().sqrt() / expected.double().square().mean().sqrt()).item()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 4096), (1, 2048, 4096), (1, 37, 32, 128), (1, 5, 2880), (1, 3, 16384)]
)
def test_rmsnorm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = (
        randn(*shape, dtype=dtype),
        randn(*shape, dtype=dtype),
        randn(shape[-1], dtype=dtype),
    )
    assert (
        relative_error(ops.triton_rmsnorm(x, weight, 1e-5), ops.torch_rmsnorm(x, weight, 1e-5))
        < DTYPES[dtype]
    )
    ours = ops.triton_fused_add_rmsnorm(x, residual, weight, 1e-5)
    theirs = ops.torch_fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(ours[1], theirs[1])
    assert relative_error(ours[0], theirs[0]) < DTYPES[dtype]


def test_rmsnorm_of_heads_inside_a_projection() -> None:
    wide, weight = randn(1, 65, 48 * 128), randn(128)
    heads = wide[..., 128 * 4 : 128 * 36].view(1, 65, 32, 128)
    assert (
        relative_error(
            ops.triton_rmsnorm(heads, weight, 1e-6), ops.torch_rmsnorm(heads, weight, 1e-6)
        )
        < 1e-2
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_silu_and_mul(dtype: torch.dtype, activation: str) -> None:
    x = randn(1, 129, 2 * 14336, dtype=dtype)
    expected = ops.torch_silu_and_mul(x.double(), activation)
    assert relative_error(ops.triton_silu_and_mul(x, activation), expected) < DTYPES[dtype]


def test_fused_swiglu_mlp() -> None:
    x, both, down = randn(1, 65, 1024), randn(2 * 3072, 1024) / 32, randn(1024, 3072) / 55
    expected = ops.torch_fused_swiglu_mlp(x.double(), both.double(), down.double())
    assert relative_error(ops.triton_fused_swiglu_mlp(x, both, down), expected) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "size"), [(128, 128), (64, 64), (96, 96), (80, 32), (256, 128)])
@pytest.mark.parametrize("batch", [1, 3])
def test_rope_cached(dtype: torch.dtype, dim: int, size: int, batch: int) -> None:
    q, k = randn(batch, 70, 32, dim, dtype=dtype), randn(batch, 70, 8, dim, dtype=dtype)
    angle = torch.rand(batch, 70, size // 2, device="cuda").repeat(1, 1, 2) * 6.28
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = ops.torch_rope_cached(*(t.double() for t in (q, k, cos, sin)))
    for ours, theirs in zip(ops.triton_rope_cached(q, k, cos, sin), expected, strict=True):
        assert relative_error(ours, theirs) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "size"), [(128, 128), (80, 32)])
def test_norm_rope_of_heads_inside_a_projection(dtype: torch.dtype, dim: int, size: int) -> None:
    wide = randn(1, 70, 24 * dim, dtype=dtype) * 3
    q, k = wide[..., : 16 * dim].view(1, 70, 16, dim), wide[..., 16 * dim :].view(1, 70, 8, dim)
    weights = randn(dim, dtype=dtype), randn(dim, dtype=dtype)
    angle = torch.rand(1, 70, size // 2, device="cuda").repeat(1, 1, 2) * 6.28
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    expected = ops.torch_norm_rope(
        *(t.double() for t in (q, k, *weights)), 1e-6, cos.double(), sin.double()
    )
    for ours, theirs in zip(
        ops.triton_norm_rope(q, k, *weights, 1e-6, cos, sin), expected, strict=True
    ):
        assert relative_error(ours, theirs) < DTYPES[dtype]


LINEARS = {
    "norm": (1024, 4096, {"norm"}),
    "norm, gate": (4096, 2 * 14336, {"norm", "gate"}),
    "residual, split": (3072, 1024, {"residual"}),
    "bias, residual": (14336, 4096, {"bias", "residual"}),
    "ragged": (2880, 5120 + 3, {"bias"}),
}


def make_linear(rows: int, name: str, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    columns, outputs, around = LINEARS[name]
    x, weight = (
        randn(1, rows, columns, dtype=dtype),
        randn(outputs, columns, dtype=dtype) / columns**0.5,
    )
    bias = randn(outputs, dtype=dtype) if "bias" in around else None
    residual = randn(1, rows, outputs, dtype=dtype) if "residual" in around else None
    norm = randn(columns, dtype=dtype) if "norm" in around else None
    return [x, weight, bias, residual, norm, 1e-5, "silu" if "gate" in around else ""]


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("rows", [1, 2, 8, 33, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fused_linear(rows: int, name: str, dtype: torch.dtype) -> None:
    arguments = make_linear(rows, name, dtype)
    double = [each.double() if isinstance(each, Tensor) else each for each in arguments]
    actual = ops.triton_fused_linear(*arguments)
    assert relative_error(actual, ops.torch_fused_linear(*double)) < DTYPES[dtype]
    assert torch.equal(actual, ops.triton_fused_linear(*arguments))


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_captured_chain_of_overlapping_kernels_gives_what_single_ones_do(rows: int) -> None:
    """Each reads what the one before it writes, which must not be read too early, in every
    replay.
    """
    up, down = make_linear(rows, "norm, gate"), make_linear(rows, "bias, residual")

    def chain() -> Tensor:
        x = up[0]
        for _ in range(8):
            x = ops.triton_fused_linear(ops.triton_fused_linear(x, *up[1:]), down[1], down[2], x)
        return ops.triton_rmsnorm(x, up[4], 1e-5)

    graph, out = captured(chain)
    for _ in range(5):
        up[0].normal_()
        x = up[0]
        for _ in range(8):
            torch.cuda.synchronize()
            middle = ops.triton_fused_linear(x, *up[1:])
            torch.cuda.synchronize()
            x = ops.triton_fused_linear(middle, down[1], down[2], x)
        torch.cuda.synchronize()
        expected = ops.triton_rmsnorm(x, up[4], 1e-5)
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@dataclass
class Step:
    """The arguments of a cached attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    kv_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    batch_info_host: Tensor
    k_cache: Tensor
    v_cache: Tensor

    def double(self) -> Step:
        """The same step in float64, with caches of its own."""
        names = ("query", "key", "value", "k_cache", "v_cache")
        return replace(self, **{name: getattr(self, name).double() for name in names})

    def run(self, op: str = "triton", **options: Any) -> Tensor:
        return getattr(ops, f"{op}_cached_attention")(*vars(self).values(), **options)


def slots(block_table: Tensor, sequence: int, positions: Tensor) -> Tensor:
    return block_table[sequence].long()[positions // PAGE] * PAGE + positions % PAGE


def make_step(
    lengths: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    capacity: int = 4096,
) -> Step:
    """Random sequences of (new, all) tokens in shuffled pages; the caches are full of random
    numbers already.
    """
    pages = capacity // PAGE
    table = torch.randperm(len(lengths) * pages, device="cuda").view(len(lengths), pages).int() + 1
    new = [n for n, _ in lengths]
    kv_lens = [length for _, length in lengths]
    mapping = [
        slots(table, i, torch.arange(m - n, m, device="cuda")) for i, (n, m) in enumerate(lengths)
    ]
    shape = (len(lengths) * pages + 1, kv_heads, PAGE, dim)
    return Step(
        *(randn(1, sum(new), count, dim, dtype=dtype) for count in (heads, kv_heads, kv_heads)),
        torch.tensor([0, *new], device="cuda").cumsum(0).int(),
        torch.tensor(kv_lens, device="cuda").int(),
        table,
        torch.cat(mapping),
        torch.tensor(
            [len(lengths), sum(new), max(new), max(kv_lens), new == kv_lens], dtype=torch.int32
        ),
        *(randn(*shape, dtype=dtype) for _ in range(2)),
    )


STEPS = {
    "prefill": [(700, 700), (3, 3), (129, 129)],
    "one prompt": [(512, 512)],
    "chunked prefill": [(256, 1500), (100, 101)],
    "decode": [(1, n) for n in (1, 2, 31, 32, 33, 64, 65, 500, 1025, 4000)],
    "one decode": [(1, 3001)],
    "mixed": [(1, 2000), (65, 65), (1, 1), (30, 999)],
}
MODELS = {
    "32 heads on 8 of 128": (32, 8, 128, {}),
    "16 heads on 8 of 256, cap and window": (
        16,
        8,
        256,
        {"logit_cap": 50.0, "sliding_window": 1024, "scale": 0.06},
    ),
    "64 heads on 8 of 64, sinks and window": (64, 8, 64, {"sinks": True, "sliding_window": 128}),
    "32 heads of 96, window": (32, 32, 96, {"sliding_window": 2047}),
    "71 heads on 1 of 64": (71, 1, 64, {}),
    "40 heads on 8 of 128, chunks": (40, 8, 128, {"chunk_size": 512}),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cached_attention(step: str, model: str, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, options = MODELS[model]
    options = (
        options | {"sinks": torch.randn(heads, device="cuda")} if "sinks" in options else options
    )
    ours = make_step(STEPS[step], heads, kv_heads, dim, dtype)
    theirs = ours.double()
    expected = theirs.run("torch", **options)
    assert relative_error(ours.run(**options), expected) < DTYPES[dtype]
    assert torch.equal(ours.k_cache.double(), theirs.k_cache)
    assert torch.equal(ours.v_cache.double(), theirs.v_cache)


def test_rows_of_no_sequence_are_zeros_beside_whole_prompts() -> None:
    step = make_step(STEPS["prefill"], 32, 8, 128, torch.bfloat16)
    expected = step.double().run("torch")
    real = expected.shape[1]
    for name in ("query", "key", "value"):
        setattr(step, name, F.pad(getattr(step, name), (0, 0, 0, 0, 0, 7)))
    step.slot_mapping = F.pad(step.slot_mapping, (0, 7))
    out = step.run()
    assert relative_error(out[:, :real], expected) < 1e-2
    assert not out[:, real:].any()


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("step", STEPS)
def test_cached_attention_with_a_cache_of_another_dtype(
    cache_dtype: torch.dtype, step: str
) -> None:
    ours = make_step(STEPS[step], 32, 8, 128, torch.bfloat16)
    ours.k_cache, ours.v_cache = ours.k_cache.to(cache_dtype), ours.v_cache.to(cache_dtype)
    theirs = ours.double()
    theirs.key, theirs.value = (t.to(cache_dtype).double() for t in (ours.key, ours.value))
    assert relative_error(ours.run(), theirs.run("torch")) < 1e-2


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    function()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 2, 64)])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 200, "logit_cap": 30.0}])
def test_a_captured_decode_follows_the_lengths(
    heads: int, kv_heads: int, dim: int, options: dict[str, Any]
) -> None:
    """Captured at length 1, replayed at others, with two padding rows that share page 0."""
    static = make_step([(1, 1)] * 5, heads, kv_heads, dim, torch.bfloat16)
    static.block_table[3:], static.slot_mapping[3:] = 0, 0
    graph, out = captured(lambda: static.run(**options))
    lengths = torch.tensor([5, 63, 2000], device="cuda")
    for _ in range(4):
        static.kv_lens[:3] = lengths
        for row in range(3):
            static.slot_mapping[row] = slots(static.block_table, row, lengths[row] - 1)
        for tensor in (static.query, static.key, static.value):
            tensor.normal_()
        expected = static.double().run("torch", **options)
        graph.replay()
        assert relative_error(out[:, :3], expected[:, :3]) < 1e-2
        assert out.isfinite().all()
        lengths += 1


def test_a_whole_decode_block_can_be_captured() -> None:
    """The other ops in one graph; replaying twice gives the same."""
    x, residual, weight = randn(1, 8, 1024), randn(1, 8, 1024), randn(1024)
    both, down = randn(6144, 1024) / 32, randn(1024, 3072) / 55
    q, k, table = randn(1, 8, 16, 128), randn(1, 8, 8, 128), randn(1, 8, 128)

    def block() -> tuple[Tensor, ...]:
        normed, total = ops.triton_fused_add_rmsnorm(x, residual, weight, 1e-6)
        rotated = ops.triton_rope_cached(q, k, table, table)
        return (
            total,
            ops.triton_fused_swiglu_mlp(normed, both, down),
            ops.triton_rmsnorm(x, weight, 1e-6),
            *rotated,
        )

    expected = block()
    graph, out = captured(block)
    graph.replay()
    graph.replay()
    for ours, theirs in zip(out, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-2


def milliseconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """Time of one call inside a CUDA graph of `repeats` calls."""
    graph, _ = captured(lambda: [function() for _ in range(repeats)])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


@pytest.mark.parametrize("sequences", [1, 8, 32, 64])
@pytest.mark.parametrize("length", [1024, 4096])
def test_decode_is_faster_than_the_reference(sequences: int, length: int) -> None:
    step = make_step([(1, length)] * sequences, 32, 8, 128, torch.bfloat16)
    ours = milliseconds(step.run)
    gigabytes = sequences * length * 8 * 128 * 2 * 2 / 1e9
    keys, values = (randn(sequences, 8, length, 128) for _ in range(2))
    query = randn(sequences, 32, 1, 128)
    peer = milliseconds(
        lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    )
    speed = f"{ours * 1e3:.1f} us, {gigabytes / ours * 1e3:.0f} GB/s"
    print(f"decode {sequences} x {length}: {speed}; SDPA {peer * 1e3:.1f} us")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step.run("torch")
    start.record()
    step.run("torch")
    end.record()
    end.synchronize()
    assert ours < start.elapsed_time(end)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 128), (16, 8, 256)])
def test_prefill_reads_pages_about_as_fast_as_dense_keys(
    heads: int, kv_heads: int, dim: int
) -> None:
    length = 2048
    step = make_step([(length, length)], heads, kv_heads, dim, torch.bfloat16)
    ours = milliseconds(step.run)
    query, keys, values = (t.transpose(1, 2) for t in (step.query, step.key, step.value))
    peer = milliseconds(
        lambda: F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    )
    teraflops = 2 * heads * length * length * dim / ours / 1e9
    print(
        f"prefill {heads}/{kv_heads} x {dim}: {ours * 1e3:.0f} us, {teraflops:.0f} TFLOP/s; SDPA {peer * 1e3:.0f} us"
    )
    assert ours < 8 * peer
