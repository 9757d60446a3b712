"""Kernels in CUDA C++ compile for a Hopper GPU, on any machine that has NVRTC: what they compute is
tested on a GPU (`test_few_tokens_gpu.py`, `test_some_tokens_gpu.py` and `test_decode_attention_gpu.py` in `tests/gpu`).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from onboard.errors import OnboardError
from onboard.ops.attention import cuda_decode_attention as decoding
from onboard.ops.cuda.nvrtc import compiled
from onboard.ops.experts import cuda_few_tokens_moe as moe
from onboard.ops.few_tokens import cuda_few_tokens as few
from onboard.ops.four_bits.four_bits import RUN, WORDS, Words
from onboard.ops.linear import cuda_fp8_codes as codes
from onboard.ops.linear import cuda_some_tokens as some

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
INT4, FLOATS = ("int4", 128, torch.bfloat16), ("e2m1", 32, torch.uint8)
FORMS: list[tuple[int, tuple[str, int, torch.dtype], dict[str, Any]]] = [
    (1, INT4, {"gated": True, "activation": "silu", "norm": torch.ones(1)}),
    (1, FLOATS, {"residual": torch.ones(1)}),
    (8, INT4, {"residual": torch.ones(1)}),
    (8, FLOATS, {"gated": True, "activation": "gelu", "norm": torch.ones(1)}),
    (8, ("e2m1", 16, torch.float8_e4m3fn), {}),
    (3, ("int4", 64, torch.float16), {"limit": 7.0, "alpha": 1.7}),
    (16, INT4, {"gated": True, "activation": "silu", "norm": torch.ones(1)}),
    (16, FLOATS, {"residual": torch.ones(1)}),
    (1, ("e4m3", 2880, torch.float32), {"norm": torch.ones(1)}),
    (1, ("e4m3", 128, torch.float32), {"gated": True, "activation": "silu"}),
]


def _words(kind: tuple[str, int, torch.dtype], inputs: int, rows: int = 4096) -> Words:
    levels, group, dtype = kind
    values = torch.empty(rows, -(-inputs // RUN) * WORDS, dtype=torch.int32, device="meta")
    scale = torch.empty(rows, -(-inputs // group), dtype=dtype, device="meta")
    zero = scale.to(torch.uint8) if levels == "int4" else None
    return Words(values, scale, zero, None, None, levels, group)


def _usage(kept: Path, name: str) -> tuple[int, int]:
    """Return a kernel's registers, and the bytes that they have no room for."""
    command = [TOOL, "-res-usage", kept]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ((registers, stack),) = re.findall(rf"{name}:\s+REG:(\d+) STACK:(\d+)", said)
    return int(registers), int(stack)


def _stack(code: bytes, folder: Path) -> int:
    """Return the bytes that registers have no room for, of the only kernel that is kept."""
    (kept,) = (folder / "cuda").iterdir()
    assert kept.read_bytes() == code
    return _usage(kept, "few_tokens")[1]


def _macros(
    tokens: int, kind: tuple[str, int, torch.dtype], around: dict[str, Any]
) -> dict[str, int]:
    rows, inputs = 4096, 2880
    words = _words(kind, inputs, rows)
    tiles = few.tiles_for(tokens, rows, inputs, words, 132)
    form = few._form(inputs, few.columns_of(tokens), words, few.Around(**around), tiles, 1, None)
    assert form.shared <= 227 * 1024
    return dict(form.macros)


@pytest.mark.parametrize("inputs", [64, 128, 2880])
def test_blocks_share_scales_also_where_one_has_all_inputs(inputs: int) -> None:
    values = torch.empty(320, inputs, dtype=torch.float8_e4m3fn, device="meta")
    for rows in (320, 3):
        scale = torch.empty(rows, -(-inputs // 128) if rows == 3 else 1, device="meta")
        words = Words(values, scale, None, None, None, few.BYTES, 128 if rows == 3 else inputs)
        tiles = few.tiles_for(1, 320, inputs, words, 132)
        form = few._form(inputs, 1, words, few.Around(), tiles, 1, None)
        assert dict(form.macros)["SCALED_ROWS"] == (128 if rows == 3 else 1)


BLOCKS: list[tuple[int, tuple[str, int, torch.dtype], dict[str, Any]]] = [
    (16, FLOATS, {"gated": True, "order": "interleaved", "limit": 7.0, "alpha": 1.7}),
    (8, FLOATS, {"gated": True, "order": "interleaved", "limit": 7.0, "alpha": 1.7}),
    (8, INT4, {"gated": True, "activation": "silu"}),
    (16, INT4, {}),
]


@pytest.mark.parametrize(("columns", "kind", "around"), BLOCKS)
def test_forms_of_mixtures_compile_and_keep_to_registers(
    columns: int, kind: tuple[str, int, torch.dtype], around: dict[str, Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    words, table = _words(kind, 2880), torch.empty(4, 3, dtype=torch.int32)
    routing = None if around else torch.ones(32)
    blocks = few.Blocks(table, table[0], 8, 4 if around else 0, routing)
    tiles = moe._in_blocks(columns, 2880)
    form = few._form(2880, columns, words, few.Around(**around), tiles, 1, blocks)
    assert form.shared <= 227 * 1024
    assert _stack(compiled(few._source(), dict(form.macros), "sm_90a"), tmp_path) <= 128


@pytest.mark.parametrize("kind", [FLOATS, INT4])
@pytest.mark.parametrize("columns", [8, 16])
def test_inputs_and_rings_of_a_block_have_room(
    columns: int, kind: tuple[str, int, torch.dtype]
) -> None:
    table = torch.empty(4, 3, dtype=torch.int32)
    for inputs in range(2048, 32768, 64):
        blocks, tiles = few.Blocks(table, table[0], 8, 4), moe._in_blocks(columns, inputs)
        form = few._form(inputs, columns, _words(kind, inputs), few.Around(), tiles, 1, blocks)
        assert form.shared <= 227 * 1024, (inputs, tiles)


@pytest.mark.parametrize(("tokens", "kind", "around"), FORMS)
def test_forms_compile_and_keep_to_registers(
    tokens: int, kind: tuple[str, int, torch.dtype], around: dict[str, Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    code = compiled(few._source(), _macros(tokens, kind, around), "sm_90a")
    assert _stack(code, tmp_path) <= 128


SHAPES = [
    (6144, 4096, ""),
    (4096, 4096, ""),
    (28672, 4096, "silu"),
    (4096, 14336, ""),
    (200, 300, "gelu"),
]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "act"), SHAPES)
def test_products_of_some_tokens_compile_and_keep_to_registers(
    rows: int, inputs: int, act: str, grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    shares = some.shares_for(rows, inputs, bool(act), 132)
    form = some.form_of(inputs, 64, shares, grouped, act, grouped, not act)
    compiled(some.source(shares.width), dict(form.macros), "sm_90a")
    (kept,) = (tmp_path / "cuda").iterdir()
    registers, stack = _usage(kept, "some_tokens")
    threads = 128 * shares.groups * shares.parts + 64
    assert stack == 0
    assert registers * threads <= 65536


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("box", [8, 32, 64])
def test_rings_of_some_tokens_have_room_and_keep_their_warps(box: int, gated: bool) -> None:
    for rows in range(8, 60000, 1176):
        for inputs in (16, 128, 400, 4096, 14336, 32768):
            shares = some.shares_for(rows, inputs, gated, 132)
            form = some.form_of(inputs, box, shares, True, "silu" if gated else "", True, True)
            stages = dict(form.macros)["STAGES"]
            own = -(-dict(form.macros)["BLOCKS"] // shares.cluster)
            assert form.shared <= 227 * 1024, (rows, inputs, shares)
            assert stages == own or stages % shares.parts == 0 < stages, (rows, inputs, shares)


@pytest.mark.parametrize(
    ("columns", "how", "norm", "act"), [(4096, "token", True, ""), (14336, "group", False, "silu")]
)
def test_codes_of_rows_compile_and_keep_to_registers(
    columns: int, how: str, norm: bool, act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    form = codes.form_of(columns, how, norm, act, early=True)
    compiled(codes.source(), form.macros(), "sm_90a")
    (kept,) = (tmp_path / "cuda").iterdir()
    registers, stack = _usage(kept, "fp8_codes")
    assert stack == 0
    assert registers * form.threads <= 65536


ATTENTION = [
    {"DIM": 128, "VALUE_DIM": 128, "GROUP": 4, "CLUSTER": 8, "WARPS": 8, "SIZE": 128, "TURNS": 1, "STEP": 1},
    {"DIM": 128, "VALUE_DIM": 128, "GROUP": 8, "CLUSTER": 4, "SIZE": 128, "TURNS": 1, "STEP": 1, "HAS_NORMS": 1},
    {"DIM": 64, "VALUE_DIM": 64, "GROUP": 8, "WINDOW": 128, "HAS_SINKS": 1, "SINK_TYPE": 2},
    {"DIM": 96, "VALUE_DIM": 80, "GROUP": 16, "CHUNK": 512, "HAS_CAP": 1, "SIZE": 32, "TURNS": 3, "STEP": 2},
]  # fmt: skip


@pytest.mark.parametrize("given", ATTENTION)
def test_attention_compiles_and_keeps_to_registers(
    given: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    flags = ("HAS_SINKS", "HAS_CAP", "HAS_NORMS")
    zeros = dict.fromkeys(("WINDOW", "CHUNK", *flags, "SIZE", "STEP", "TURNS"), 0)
    types = dict.fromkeys(("TABLE_TYPE", "SINK_TYPE"), 0)
    division = {"PAGE": 32, "WARPS": 4, "CLUSTER": 1, "RESIDENT": 1}
    macros = {**zeros, **types, **division, **given}
    assert decoding._shared(macros) <= 227 * 1024
    source = Path(decoding.__file__).with_name("decode_attention.cu").read_text(encoding="utf-8")
    compiled(source, macros, "sm_90a")
    (kept,) = (tmp_path / "cuda").iterdir()
    assert _usage(kept, "decode_attention")[1] == 0


def test_what_does_not_compile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    with pytest.raises(OnboardError, match="does not compile.*nothing_known"):
        compiled("__global__ void f() { nothing_known(); }", {}, "sm_90a")
    assert not (tmp_path / "cuda").exists()
