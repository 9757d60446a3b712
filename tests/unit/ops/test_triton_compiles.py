"""Every kernel compiles for a Hopper GPU, on any machine: the interpreter checks no types and has
no limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import onboard.ops  # noqa: F401
from onboard.ops.attention import triton_cached_attention as cached_attention
from onboard.ops.collectives import triton_long_sum, triton_peer_sum, triton_rank_embedding
from onboard.ops.convolution import triton_cached_causal_conv as cached_causal_conv
from onboard.ops.delta_rule import triton_cached_delta_rule as cached_delta_rule
from onboard.ops.experts import triton_moe as moe
from onboard.ops.experts import triton_router as router
from onboard.ops.four_bits import triton_four_bit_linear as four_bit_linear
from onboard.ops.integers import triton_int8_linear as int8_linear
from onboard.ops.latent_attention import triton_cached_mla as cached_mla
from onboard.ops.linear import triton_fp8_linear as fp8_linear
from onboard.ops.linear import triton_linear as linear
from onboard.ops.linear import triton_many_tokens as many_tokens
from onboard.ops.lora import triton_lora_few_tokens
from onboard.ops.norm import triton_rmsnorm as rmsnorm
from onboard.ops.norm import triton_rmsnorm_gated as rmsnorm_gated
from onboard.ops.recurrences import triton_cached_channels as cached_channels
from onboard.ops.recurrences import triton_cached_mlstm as cached_mlstm
from onboard.ops.sampling import triton_sampling as sampling
from onboard.ops.sparse import triton_cached_sparse_mla as cached_sparse_mla
from onboard.ops.ssm import triton_cached_ssm as cached_ssm
from onboard.ops.triton import host_copy, launch
from onboard.parallel.peer_memory import PeerMemory
from tests.support.ops import ragged, recurrent
from tests.support.ops.chosen_latents import sparse_mla
from tests.support.ops.lora import Adapted
from tests.support.ops.naive import make_batch
from tests.support.ops.rotated import TURNS, tables, with_rotation

ops = torch.ops.onboard

SHARED_MEMORY = 227 * 1024


class NoDevice:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Launches are compiled and collected here instead of run."""
    compiled: list[Any] = []
    functions: list[JITFunction] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        functions.append(self)
        self.device_caches.clear()
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch, "INTERPRETED", True)  # lets tensors on the CPU through
    for launcher in (
        cached_attention,
        cached_mla,
        triton_long_sum,
        triton_peer_sum,
        triton_rank_embedding,
    ):
        monkeypatch.setattr(
            launcher, "overlaps", lambda device: {"OVERLAP": True, "launch_pdl": True}
        )
    monkeypatch.setattr(driver, "_active", NoDevice())
    yield compiled
    for function in functions:
        function.device_caches.clear()


def assert_compiled(kernels: list[Any], names: set[str]) -> None:
    assert {kernel.metadata.name for kernel in kernels} == names
    assert all(kernel.asm["cubin"] for kernel in kernels)
    assert max(kernel.metadata.shared for kernel in kernels) <= SHARED_MEMORY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_elementwise_kernels(kernels: list[Any], dtype: torch.dtype) -> None:
    x, weight, heads, table = (
        torch.randn(s).to(dtype) for s in [(1, 3, 256), (256,), (1, 3, 4, 64), (1, 3, 32)]
    )
    ops.triton_rmsnorm(x, weight, 1e-6)
    ops.triton_fused_add_rmsnorm(x, x, weight, 1e-6)
    for activation in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"):
        ops.triton_silu_and_mul(x, activation)
    ops.triton_rope_cached(heads, heads, table, table)
    ops.triton_norm_rope(heads, heads, weight[:64], weight[:64], 1e-6, table, table)
    assert_compiled(kernels, {"_rmsnorm_kernel", "_act_and_mul_kernel", "_rope_kernel"})


def test_kernels_of_pairs_lengths_gates_and_sums_that_are_cast(kernels: list[Any]) -> None:
    x, weight, heads, table = (
        torch.randn(s).bfloat16() for s in [(1, 3, 256), (256,), (1, 3, 4, 64), (1, 3, 32)]
    )
    ops.triton_rope_deinterleaved(heads, heads, table, table)
    ops.triton_rope_pairs(heads, heads, torch.view_as_complex(table.float().unflatten(-1, (-1, 2))))
    ops.triton_l2norm(x, 1e-6)
    ops.triton_fused_gdn_gating(x, x, weight.float(), weight)
    ops.triton_fused_add_rmsnorm(x, x.float(), weight, 1e-6, torch.bfloat16)
    assert_compiled(
        kernels, {"_rope_kernel", "_l2norm_kernel", "_gdn_gating_kernel", "_rmsnorm_kernel"}
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_several_ranks(kernels: list[Any], world: int, dtype: torch.dtype) -> None:
    memory = PeerMemory(1, [0] * world, torch.device("cpu"))
    rows, weight = torch.randn(16, 2880).to(dtype), torch.randn(2880).to(dtype)
    out, total = torch.empty_like(rows), torch.empty_like(rows)
    for add in (
        triton_peer_sum.one_shot_sum,
        triton_peer_sum.two_shot_sum,
        triton_long_sum.long_sum,
    ):
        assert add(rows, memory, rows) is not None
    assert triton_peer_sum.peer_gather(rows, -1, memory) is not None
    given = {"dtype": dtype, "wide": False}
    assert triton_peer_sum.peer_sum_and_norm(out, total, rows, rows, weight, 1e-5, memory, **given)
    norm = triton_long_sum.Norm(total, weight, 1e-5, **given)
    assert triton_long_sum.long_sum_and_norm(out, rows, rows, memory, norm)
    triton_rank_embedding.lookup(torch.arange(3), weight.expand(5, -1).contiguous(), 2)
    names = ("one_shot", "two_shot", "gather", "one_shot_norm", "long_sum", "lookup")
    assert_compiled(kernels, {f"_{name}_kernel" for name in names})
    for kernel in kernels[:-1]:  # sixteen bytes a store
        assert "st.global.v4" in kernel.asm["ptx"]
        assert "st.global.b16" not in kernel.asm["ptx"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_that_choose_tokens(kernels: list[Any], dtype: torch.dtype) -> None:
    latest, columns = torch.zeros(4, dtype=torch.int64), torch.rand(4, 3)
    sampling.fill(torch.ones(1, 3, dtype=torch.int64), latest)
    sampling.choose_and_keep(
        torch.randn(3, 151936).to(dtype),
        *columns,
        torch.rand(3, dtype=torch.float64),
        latest,
        torch.zeros(4, 2, dtype=torch.int64),
        torch.arange(3),
        torch.ones(3, dtype=torch.int32),
    )
    host_copy.copy(latest, latest)
    table = torch.zeros(3, 4096, dtype=torch.int32)
    host_copy.copy_rows(table, table, torch.ones(3, dtype=torch.int32))
    assert_compiled(
        kernels,
        {"fill_kernel", "largest_kernel", "choose_kernel", "copy_kernel", "copy_rows_kernel"},
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_adapters(
    kernels: list[Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        triton_lora_few_tokens, "overlaps", lambda device: {"OVERLAP": True, "launch_pdl": True}
    )
    for tokens, sizes, rank, activation in (
        (3, [256, 64, 64], 16, ""),
        (8, [384, 384], 16, "silu"),
        (16, [384], 64, "gelu"),
        (3, [384], 512, ""),
        (17, [256, 64], 16, "silu"),
    ):
        adapted = Adapted.drawn(tokens, 4096, sizes, 2, rank, dtype=dtype)
        ops.triton_lora(*adapted.arguments(), activation)
    names = {"adapt_kernel", "_down_kernel", "_up_kernel", "_act_and_mul_kernel"}
    assert_compiled(kernels, names)


MATRIX = {"matrix_kernel", "_rmsnorm_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "names"), [(1, {"vector_kernel"}), (8, MATRIX), (64, MATRIX), (200, MATRIX)]
)
def test_linear_kernels(
    kernels: list[Any], rows: int, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU of compute capability 9.0, for the layers of a model with a hidden size of
    1024.
    """
    for module in (linear, rmsnorm):
        monkeypatch.setattr(
            module, "overlaps", lambda device: {"OVERLAP": True, "launch_pdl": True}
        )
    monkeypatch.setattr(linear, "processors", lambda device: 132)
    x, wide = (torch.randn(rows, size).bfloat16() for size in (1024, 3072))
    ops.triton_fused_linear(x, torch.empty(6144, 1024).bfloat16(), None, None, x[0], 1e-6, "silu")
    ops.triton_fused_linear(wide, torch.empty(1024, 3072).bfloat16(), x[0], x)
    assert_compiled(kernels, names)
    assert all("griddepcontrol.wait" in kernel.asm["ptx"] for kernel in kernels)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
def test_kernels_of_many_tokens(
    kernels: list[Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size of tiles: its operands are copied by the hardware, and its sums stay in registers."""
    x, weight = (torch.empty(4096, 256).to(dtype) for _ in range(2))
    scales = (torch.empty(4096), torch.empty(4096)) if dtype.itemsize == 1 else (None, None)
    out = dtype if dtype.itemsize == 2 else torch.bfloat16
    monkeypatch.setattr(many_tokens, "processors", lambda device: 132)
    for rows, outputs, act in (
        (4096, 2048, "silu"),
        (4096, 4096, ""),
        (2048, 1024, ""),
        (1024, 1024, ""),
    ):
        added = None if act else torch.empty(rows, outputs, dtype=out)
        product = x[:rows], weight[: outputs * (2 if act else 1)], None, added, act, *scales, out
        assert many_tokens.tiled_product(*product) is not None
    assert_compiled(kernels, {"tile_kernel"})
    assert len({kernel.metadata.shared for kernel in kernels}) == 4
    for kernel in kernels:
        assert all(each in kernel.asm["ptx"] for each in ("wgmma.mma", "cp.async.bulk.tensor"))
        assert ".local" not in kernel.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("levels", "scales", "group", "zero"),
    [
        ("int4", torch.bfloat16, 128, None),
        ("int4", torch.float16, 32, torch.uint8),
        ("int4", torch.float32, 32, torch.float32),
        ("e2m1", torch.uint8, 32, None),
        ("e2m1", torch.float8_e4m3fn, 16, None),
    ],
)
def test_kernels_of_four_bit_linears(
    kernels: list[Any], levels: str, scales: torch.dtype, group: int, zero: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Words go to the tensor cores through registers: no other layout comes between."""
    overlapping = {"OVERLAP": True, "launch_pdl": True}
    monkeypatch.setattr(four_bit_linear, "overlaps", lambda device: overlapping)
    monkeypatch.setattr(four_bit_linear, "processors", lambda device: 132)
    words = torch.empty(4096, 512, dtype=torch.int32)
    scale = torch.empty(4096, 4096 // group, dtype=scales)
    zeros = None if zero is None else torch.empty(4096, 4096 // group, dtype=zero)
    whole = torch.empty(4096) if group == 16 else None
    rest = (None, scale, zeros, whole, levels, group)
    for rows in (16, 64):
        ops.triton_fused_four_bit_linear(torch.empty(rows, 4096).bfloat16(), words, *rest)
    assert_compiled(kernels, {"four_bit_kernel"})
    for kernel in kernels:
        loop = kernel.asm["ttgir"].split("scf.for")[1].split("scf.yield")[0]
        assert loop.count("warp_group_dot ") == 8
        assert not re.search(r"convert_layout .*tensor<\d+x\d+x", loop)
        # Scaled floats are one sum over all groups, which only the tensor cores touch
        assert ("arith.addf" in loop) == (levels == "int4")
    ops.triton_fused_four_bit_linear(torch.empty(16, 4096).half(), words, *rest)
    ops.triton_fused_four_bit_linear(torch.empty(300, 4096).bfloat16(), words, *rest)
    assert kernels[-1].metadata.name == "write_out_kernel"
    ops.triton_fused_four_bit_linear(torch.empty(1, 4096).bfloat16(), words, *rest)
    of_integers = "four_bit_rows_kernel" if group == 128 else "four_bit_kernel"
    one = "four_bit_vector_kernel" if levels == "e2m1" else of_integers
    assert kernels[-1].metadata.name == one


@pytest.mark.slow
def test_kernels_of_int8_linears(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    overlapping = {"OVERLAP": True, "launch_pdl": True}
    for module in (int8_linear, linear):
        monkeypatch.setattr(module, "overlaps", lambda device: overlapping)
        monkeypatch.setattr(module, "processors", lambda device: 132)
    monkeypatch.setattr(fp8_linear, "processors", lambda device: 132)
    weight = torch.empty(4096, 4096, dtype=torch.int8)
    for group in (32, 128, 4096):
        scale = torch.empty(4096, 4096 // group, dtype=torch.float16)
        offset = torch.empty_like(scale).float() if group == 32 else None
        for rows in (1, 16, 64, 300):
            x = torch.empty(rows, 4096).bfloat16()
            ops.triton_fused_int8_linear(x, weight, None, scale, offset, None, group)
    grouped = {"int8_vector_kernel", "int8_matrix_kernel", "int8_write_out_kernel"}
    assert_compiled(kernels, grouped | {"vector_kernel", "matrix_kernel"})
    kernels.clear()
    for rows in (16, 64, 300):
        x = torch.empty(rows, 4096).bfloat16()
        ops.triton_fused_int8_linear(x, weight, None, scale, None, None, 4096, "token")
    assert_compiled(kernels, {"_quantise_kernel", "matrix_kernel", "scale_sums_kernel"})
    products = [each for each in kernels if each.metadata.name == "matrix_kernel"]
    assert all(
        "wgmma" in kernel.asm["ptx"] and ".s8.s8" in kernel.asm["ptx"] for kernel in products
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {
        "options": {
            "sinks": torch.randn(8),
            "sliding_window": 128,
            "logit_cap": 30.0,
            "alibi_slopes": torch.randn(8),
        }
    },
    "head of 80": {"dim": 80, "value_dim": 48},
    "head of 256": {"dim": 256},
    "head of 512": {"dim": 512},
    "float32": {"dtype": torch.float32},
    "float32, head of 256": {"dtype": torch.float32, "dim": 256},
    "one key head of 71": {"heads": 71, "kv_heads": 1, "dim": 64},
    "float8 cache": {"cache_dtype": torch.float8_e4m3fn},
    "float8 cache with scales": {
        "cache_dtype": torch.float8_e4m3fn,
        "options": {"k_scale": torch.ones(2), "v_scale": torch.ones(2)},
    },
    "codes": {"options": {"out_scale": torch.ones(1)}},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_kernels(kernels: list[Any], variant: str) -> None:
    arguments = {
        "heads": 8,
        "kv_heads": 2,
        "dim": 128,
        "dtype": torch.bfloat16,
        "page_size": 32,
    } | VARIANTS[variant]
    options = arguments.pop("options", {})
    decode = make_batch([(1, 300)], spare_columns=20, **arguments)
    prefill = make_batch([(64, 64), (1, 10)], **arguments)
    for batch in (decode, prefill):
        ops.triton_cached_attention(*batch.arguments(), **options)
    assert_compiled(kernels, {"attention_kernel", "combine_kernel", "write_cache_kernel"})


@pytest.mark.slow
@pytest.mark.parametrize("turns", TURNS)
def test_attention_that_rotates(kernels: list[Any], turns: str) -> None:
    kind = {"heads": 8, "kv_heads": 2, "dim": 128, "dtype": torch.bfloat16, "page_size": 32}
    for lengths in ([(1, 300)], [(64, 64), (1, 10)]):
        _, args, named, _ = with_rotation(lengths, turns, 128, True, spare_columns=20, **kind)
        ops.triton_cached_rope_attention(*args, **named)
    names = {"attention_kernel", "combine_kernel", "_rope_kernel", "write_cache_kernel"}
    assert_compiled(kernels, names)


@pytest.mark.slow
def test_latent_attention_that_rotates(kernels: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "PAGE", 32)
    row = ragged.make_row([(1, 300)] * 2)
    arguments = ragged.mla(row, 64, 512, 64, torch.bfloat16)
    for turns in TURNS[1:]:
        given = [*arguments[:5], *tables(row.tokens, 64, turns), *arguments[5:11], turns]
        ops.triton_cached_rope_mla(*given)
    assert_compiled(kernels, {"mla_kernel", "combine_kernel"})


@pytest.mark.slow
def test_latent_attention_to_chosen_keys(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "PAGE", 32)
    overlapping = {"OVERLAP": True, "launch_pdl": True}
    monkeypatch.setattr(cached_sparse_mla, "overlaps", lambda device: overlapping)
    for lengths, heads in (([(1, 300)], 64), ([(1, 300)], 16), ([(9, 9), (1, 5)], 64)):
        given = sparse_mla(ragged.make_row(lengths), heads, 512, 64, 2048, None, torch.bfloat16)
        ops.triton_cached_sparse_mla(*given)
    assert_compiled(kernels, {"sparse_mla_kernel", "join_kernel", "write_cache_kernel"})


STATE_KERNELS = {
    "decode": {
        "mlstm_step_kernel",
        "mlstm_divide_kernel",
        "linear_recurrence_kernel",
        "wkv_kernel",
        "token_shift_kernel",
        "_conv_kernel",
        "delta_step_kernel",
        "ssm_step_kernel",
        "selective_scan_kernel",
        "mla_kernel",
    },
    "prefill": {
        "mlstm_chunk_kernel",
        "mlstm_divide_kernel",
        "linear_recurrence_kernel",
        "wkv_kernel",
        "token_shift_kernel",
        "_conv_kernel",
        "delta_solve_kernel",
        "kda_products_kernel",
        "delta_chunk_kernel",
        "ssm_chunk_kernel",
        "selective_scan_kernel",
        "mla_kernel",
        "write_cache_kernel",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "lengths"), [("decode", [(1, 300)] * 132), ("prefill", [(80, 80)])]
)
def test_kernels_of_mixers(
    kernels: list[Any], step: str, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the sizes of real heads; few of them, since memory is really there."""
    monkeypatch.setattr(ragged, "PAGE", 32)
    monkeypatch.setattr(ragged, "SLOTS", len(lengths) + 3)
    row, dtype = ragged.make_row(lengths), torch.bfloat16
    ops.triton_cached_causal_conv1d(*ragged.conv(row, 256, 4, 1, "silu", dtype=dtype))
    ops.triton_cached_gated_delta_rule(*ragged.delta_rule(row, 1, 1, 128, 128, True, dtype))
    ops.triton_cached_ssm(*ragged.ssm(row, 1, 1, 64, 128, dtype))
    ops.triton_cached_kda(*recurrent.kda(row, 1, 128, 128, True, dtype))
    ops.triton_cached_lightning_attention(*recurrent.lightning(row, 1, 128, 128, dtype))
    ops.triton_cached_linear_recurrence(*recurrent.linear_recurrence(row, 256, dtype))
    ops.triton_cached_wkv(*recurrent.wkv(row, 256, dtype))
    ops.triton_cached_token_shift(*recurrent.token_shift(row, 256, dtype))
    ops.triton_cached_mlstm(*recurrent.mlstm(row, 1, 256, 512, dtype))
    ops.triton_cached_selective_scan(*ragged.selective_scan(row, 64, 16, True, dtype))
    ops.triton_cached_mla(*ragged.mla(row, 16, 512, 64, dtype))
    assert_compiled(kernels, STATE_KERNELS[step])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "sequences"), [(torch.bfloat16, 2), (torch.float16, 132)])
def test_latent_attention_of_hopper_gpus(
    kernels: list[Any], dtype: torch.dtype, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing spills: what does misses the first cache, of which shared memory leaves little."""
    monkeypatch.setattr(ragged, "PAGE", 32)
    monkeypatch.setattr(cached_mla, "suits", lambda *_: True)
    row = ragged.make_row([(1, 300)] * sequences)
    for heads, rank, rope in ((40, 512, 64), (20, 128, 16)):
        ops.triton_cached_mla(*ragged.mla(row, heads, rank, rope, dtype))
    names = {"absorb_kernel", "hopper_mla_kernel", *(["combine_kernel"] if sequences == 2 else [])}
    assert_compiled(kernels, names)
    assert not any(re.search(r"\b(LDL|STL)\b", kernel.asm["sass"]) for kernel in kernels)


@pytest.mark.slow
def test_latents_are_loaded_while_others_are_attended_to(
    kernels: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 rows a tile, the copies of the next tile are issued before the softmax and the second
    product.
    """
    monkeypatch.setattr(ragged, "PAGE", 32)
    ops.triton_cached_mla(*ragged.mla(ragged.make_row([(1, 300)] * 2), 64, 512, 64, torch.bfloat16))
    assert_compiled(kernels, {"mla_kernel", "combine_kernel"})
    loop = kernels[0].asm["ttgir"].split("scf.for")[1]
    order = [
        loop.index(each) for each in ("warp_group_dot", "async_copy_global_to_local", "math.exp2")
    ]
    assert order == sorted(order)
    assert loop.count("ttng.warp_group_dot ") == 3


OVERLAPPING = (
    cached_causal_conv,
    cached_channels,
    cached_mlstm,
    cached_delta_rule,
    cached_ssm,
    moe,
    rmsnorm_gated,
    router,
)


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched as on a GPU where they overlap."""
    for launcher in OVERLAPPING:
        monkeypatch.setattr(
            launcher, "overlaps", lambda device: {"OVERLAP": True, "launch_pdl": True}
        )


@pytest.mark.slow
def test_kernels_of_mixtures(kernels: list[Any], overlapping: None) -> None:
    weights = [torch.empty(8, 256, 128).bfloat16(), torch.empty(8, 128, 128).bfloat16()]
    for tokens in (1, 64, 1024):
        x, chosen, routing = (
            torch.empty(tokens, 128).bfloat16(),
            torch.zeros(tokens, 2).long(),
            torch.rand(tokens, 2),
        )
        ops.triton_moe_fused(x, chosen, routing, *weights)
    ops.triton_moe_router(
        torch.randn(2, 64), 8, True, "sigmoid", torch.randn(64), 2.5, 1e-20, 8, 4, 2
    )
    sorts = {"sort_kernel", "count_kernel", "place_kernel"}
    assert_compiled(
        kernels, {"up_kernel", "down_kernel", "combine_experts_kernel", "router_kernel"} | sorts
    )


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["", "token", "group", "tensor"])
def test_kernels_of_mixtures_with_codes(kernels: list[Any], quantize: str) -> None:
    up, down = (torch.empty(8, rows, 256).to(torch.float8_e4m3fn) for rows in (512, 256))
    given = [torch.ones(8)] * 2 if quantize == "tensor" else [None, None]
    for op, scales in (
        (ops.triton_fp8_moe, [torch.ones(8, 512), torch.ones(8, 256)]),
        (ops.triton_finegrained_fp8_moe, [torch.ones(8, 4, 2), torch.ones(8, 2, 2)]),
    ):
        for tokens in (1, 16, 1024):
            x, chosen = torch.empty(tokens, 256).bfloat16(), torch.zeros(tokens, 2).long()
            arguments = (x, chosen, torch.rand(tokens, 2), up, down, *scales)
            op(*arguments, quantize=quantize, w3_w1_input_scale=given[0], w2_input_scale=given[1])
    names = {kernel.metadata.name for kernel in kernels}
    assert {"up_kernel", "down_kernel"} <= names
    assert_compiled(kernels, names)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["", "token", "tensor"])
def test_kernels_of_mixtures_with_integers(kernels: list[Any], quantize: str) -> None:
    up, down = (torch.zeros(8, rows, 256, dtype=torch.int8) for rows in (512, 256))
    given = [torch.ones(8)] * 2 if quantize == "tensor" else [None, None]
    for group in (256,) if quantize else (32, 256):
        scales = [torch.ones(8, rows, 256 // group) for rows in (512, 256)]
        offsets = [None, None] if quantize else scales
        for tokens in (1, 16, 1024):
            x, chosen = torch.empty(tokens, 256).bfloat16(), torch.zeros(tokens, 2).long()
            arguments = (x, chosen, torch.rand(tokens, 2), up, down, *scales, *offsets, group)
            ops.triton_int8_moe(
                *arguments, quantize=quantize, w3_w1_input_scale=given[0], w2_input_scale=given[1]
            )
    names = {kernel.metadata.name for kernel in kernels}
    assert {"up_kernel", "down_kernel"} <= names
    assert_compiled(kernels, names)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 1024])
def test_kernels_of_mixtures_with_words(kernels: list[Any], tokens: int) -> None:
    up, down = (torch.zeros(8, rows, 32, dtype=torch.int32) for rows in (512, 256))
    for op, group, dtype in (
        (ops.triton_int4_moe, 128, torch.bfloat16),
        (ops.triton_mxfp4_moe, 32, torch.uint8),
        (ops.triton_nvfp4_moe, 16, torch.float8_e4m3fn),
    ):
        scales = [torch.zeros(8, rows, 256 // group).to(dtype) for rows in (512, 256)]
        x, chosen = torch.empty(tokens, 256).bfloat16(), torch.zeros(tokens, 2).long()
        op(x, chosen, torch.rand(tokens, 2), up, down, *scales, group=group)
    names = {kernel.metadata.name for kernel in kernels}
    assert {"up_kernel", "down_kernel"} <= names
    assert_compiled(kernels, names)


@pytest.mark.slow
def test_kernels_that_overlap(kernels: list[Any], overlapping: None) -> None:
    row, dtype = ragged.make_row([(1, 9)] * 3), torch.bfloat16
    ops.triton_cached_causal_conv1d(*ragged.conv(row, 256, 4, 1, "silu", dtype=dtype))
    ops.triton_cached_gated_delta_rule(*ragged.delta_rule(row, 1, 1, 128, 128, True, dtype))
    ops.triton_cached_ssm(*ragged.ssm(row, 1, 1, 64, 128, dtype))
    ops.triton_cached_linear_recurrence(*recurrent.linear_recurrence(row, 256, dtype))
    ops.triton_cached_wkv(*recurrent.wkv(row, 256, dtype))
    ops.triton_cached_token_shift(*recurrent.token_shift(row, 256, dtype))
    ops.triton_cached_mlstm(*recurrent.mlstm(row, 1, 128, 128, dtype))
    x, weight = torch.randn(4, 128).bfloat16(), torch.ones(128).bfloat16()
    ops.triton_fused_rmsnorm_gated(x, weight, x, 1e-5, 128, True, dtype)
    names = {"_conv_kernel", "delta_step_kernel", "ssm_step_kernel", "_rmsnorm_gated_kernel"}
    names |= {"linear_recurrence_kernel", "wkv_kernel", "token_shift_kernel"}
    names |= {"mlstm_step_kernel", "mlstm_divide_kernel"}
    assert_compiled(kernels, names)


@pytest.mark.slow
def test_kernels_of_long_prompts(kernels: list[Any]) -> None:
    row, dtype = ragged.make_row([(600, 600)]), torch.bfloat16
    ops.triton_cached_ssm(*ragged.ssm(row, 1, 1, 64, 128, dtype))
    ops.triton_cached_lightning_attention(*recurrent.lightning(row, 1, 128, 128, dtype))
    assert_compiled(kernels, {"ssd_state_kernel", "ssd_pass_kernel", "ssd_output_kernel"})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["token", "group", "tensor"])
def test_kernels_that_quantise(kernels: list[Any], how: str) -> None:
    x, norm, given = torch.randn(3, 512).bfloat16(), torch.randn(512).bfloat16(), torch.ones(1)
    codes, scales = ops.triton_rmsnorm_quant_fp8(x, norm, 1e-6, how, given)
    ops.triton_silu_and_mul_quant_fp8(x, "silu", how, given)
    weight = torch.empty(256, 512, dtype=torch.float8_e4m3fn)
    for weight_scale in (torch.ones(256), torch.ones(2, 4)):
        ops.triton_fp8_codes_linear(codes, scales, weight, None, weight_scale, torch.bfloat16)
    assert_compiled(kernels, {"_quantise_kernel", "matrix_kernel"})
