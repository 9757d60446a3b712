"""Eight-bit floats over up to 64 tokens on Hopper GPUs: how their kernel is launched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onboard.ops.cuda.kernel import Kernel
from onboard.ops.cuda.nvrtc import compiled
from onboard.ops.cuda.tensor_map import TensorMap, tensor_map
from onboard.ops.linear.activation import number_in_cuda
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.ops.triton.launch import power_of_two, processors, runs_hopper_code

_MOST_TOKENS = 64
"""Rows of a product of the tensor cores."""
_MOST_INPUTS = 32768
"""Whose scales a program's memory holds beside its ring."""
_STEP, _MOST_WIDTH = 8, 128
"""Rows of a weight that four warps multiply: their sums are in registers."""
_MEMORY = 227 * 1024 - 1024
"""Bytes of a program's memory, but for those by which the ring is moved to a multiple of 1024."""
_EXCHANGE = 2048
"""What adding up the sums of two programs costs, in rows of a block that are brought in that time."""


@dataclass(frozen=True)
class Shares:
    """How the work is divided: rows of four warps, programs along inputs, groups of four warps along
    rows, and along blocks of inputs; see `some_tokens.cu`.
    """

    width: int
    cluster: int = 1
    groups: int = 2
    parts: int = 1

    @property
    def rows(self) -> int:
        """Of a program."""
        return self.width * self.groups


@dataclass(frozen=True)
class Form:
    """What the kernel is compiled for, and the bytes of memory of a program."""

    shares: Shares
    macros: tuple[tuple[str, int], ...]
    shared: int


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernel."""

    _fields_ = (
        ("weight", TensorMap), ("x", TensorMap),
        *((name, ctypes.c_void_p) for name in ("out", "weight_scale", "x_scale", "bias", "residual")),
        *((name, ctypes.c_int) for name in ("tokens", "outputs")),
    )  # fmt: skip


def suits(
    codes: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    residual: Tensor | None, act: str, dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether the kernel computes these products: on Hopper GPUs, of few enough tokens, where scales are
    of rows and tokens or of blocks of both.
    """
    outputs = len(weight) // (2 if act else 1)
    brought = [t for t in (codes, weight, scale, x_scale, residual) if t is not None]
    return (
        0 < len(codes) <= _MOST_TOKENS
        and runs_hopper_code(codes.device)
        and dtype == torch.bfloat16
        and scale.dim() == x_scale.dim()
        and scale.dtype == x_scale.dtype == torch.float32
        and len(scale) == (len(weight) if scale.dim() == 1 else -(-len(weight) // BLOCK))
        and outputs % _STEP == codes.shape[1] % 16 == 0
        and codes.shape[1] <= _MOST_INPUTS
        and all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in brought)
        and all(t is None or t.dtype == dtype for t in (bias, residual))
    )


@cache
def shares_for(rows: int, inputs: int, gated: bool, many: int) -> Shares:
    """Return the shares for `rows` of a weight on so many processors: those of which a program has the
    fewest bytes to bring, of the weight and of all tokens.
    """

    def cost(shares: Shares) -> int:
        turns = -(-(-(-rows // shares.rows) * shares.cluster) // many)
        blocks = -(-inputs // (BLOCK * shares.cluster))
        return turns * blocks * (shares.rows + _MOST_TOKENS) + _EXCHANGE * (shares.cluster - 1)

    widths = range(_STEP, _MOST_WIDTH + 1, _STEP)
    groups = (2,) if gated else (1, 2)
    known = (Shares(w, c, g, _parts(w, g)) for g in groups for c in (1, 2) for w in widths)
    return min(known, key=cost)


def _parts(width: int, groups: int) -> int:
    """Along blocks: the narrower a product, the longer it waits for what it has asked for."""
    return 1 if width * groups > 128 else 2 if width > 32 or groups > 1 else 4


def some_tokens(
    codes: Tensor, x_scale: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor,
    residual: Tensor | None, act: str, dtype: torch.dtype, shares: Shares | None = None,
) -> Tensor:  # fmt: skip
    """Return products [tokens, outputs] of codes [tokens, inputs] and a weight, float8_e4m3fn both; its
    rows are gates, then what they multiply, where there is an activation. Scales are float32: [tokens]
    and [rows], or [tokens, blocks] and [blocks, blocks].
    """
    (tokens, inputs), outputs = codes.shape, len(weight) // (2 if act else 1)
    many = processors(codes.device)
    shares = shares or shares_for(len(weight), inputs, bool(act), many)
    box = max(_STEP, power_of_two(tokens))
    form = form_of(
        inputs, box, shares, scale.dim() == 2, act, bias is not None, residual is not None
    )
    out = codes.new_empty(tokens, outputs, dtype=dtype)
    arguments = _Arguments(
        tensor_map(weight.data_ptr(), len(weight), inputs, shares.width),
        tensor_map(codes.data_ptr(), tokens, inputs, box),
        *(None if t is None else t.data_ptr() for t in (out, scale, x_scale, bias, residual)),
        tokens, outputs,
    )  # fmt: skip
    tiles = -(-outputs // (shares.width if act else shares.rows))
    _kernel(form, codes.device).launch((tiles * shares.cluster, 1), arguments, shares.cluster)
    return out


def form_of(
    inputs: int,
    box: int,
    shares: Shares,
    grouped: bool,
    act: str,
    has_bias: bool,
    has_residual: bool,
) -> Form:
    """Return what the kernel is compiled for, where blocks have `box` tokens. Where stages of its ring are
    used again, all blocks of one are the same warps': others could take a block for the one before it.
    """
    blocks = -(-inputs // BLOCK)
    stage, own = (shares.rows + box) * BLOCK, -(-blocks // shares.cluster)
    of_blocks = (own + 4) * _MOST_TOKENS + own * shares.rows // _STEP
    scales = 4 * (2 * shares.rows + (of_blocks if grouped else _MOST_TOKENS))
    beyond = (_MOST_TOKENS - box) * BLOCK  # is read of the last stage
    stages = min((_MEMORY - scales) // (stage + 16), (_MEMORY - beyond) // stage)
    stages = own if own <= stages else stages - stages % shares.parts
    ring = max(stages * stage, 4 * shares.parts * _MOST_TOKENS * (shares.rows + 4))
    shared = 1024 + max(ring + 16 * stages + scales, stages * stage + beyond)
    macros = {
        "WIDTH": shares.width, "BOX": box, "CLUSTER": shares.cluster, "GROUPS": shares.groups, "PARTS": shares.parts,
        "BLOCKS": blocks, "STAGES": stages, "RING": ring, "GROUPED": grouped, "GATED": bool(act),
        "ACTIVATION": number_in_cuda(act), "HAS_BIAS": has_bias, "HAS_RESIDUAL": has_residual,
    }  # fmt: skip
    counts = tuple((name, int(value)) for name, value in macros.items())
    return Form(shares, counts, shared)


@cache
def _kernel(form: Form, device: torch.device) -> Kernel:
    code = compiled(source(form.shares.width), dict(form.macros), "sm_90a")
    threads = 128 * form.shares.groups * form.shares.parts + 64
    with torch.cuda.device(device):
        return Kernel(code, "some_tokens", threads, form.shared)


def source(width: int) -> str:
    """Return the kernel's source, for four warps that have `width` rows of a weight."""
    kernel = Path(__file__).with_name("some_tokens.cu")
    return _product(width) + kernel.read_text(encoding="utf-8")


def _product(width: int) -> str:
    """Return the function of four warps' products of a block, whose instructions name each sum."""
    count = width // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    steps = "".join(
        f'"add.s64 a, %{count}, {2 * step}; add.s64 b, %{count + 1}, {2 * step}; setp.ne.b32 p, {step}, 0;"\n'
        f'"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3 {{{sums}}}, a, b, p, 1, 1;"\n'
        for step in range(BLOCK // 32)
    )
    outputs = ", ".join(f'"=f"(sums[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void multiply_block(float (&sums)[{count}], u64 tokens, u64 rows) {{\n"
        f'asm volatile("{{ .reg .b64 a, b; .reg .pred p; wgmma.fence.sync.aligned;"\n{steps}'
        '"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"\n'
        f': {outputs} : "l"(tokens), "l"(rows) : "memory");\n}}\n'
    )
