"""Rows of eight-bit floats on Hopper GPUs: how their kernel is launched."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from onboard.ops.cuda.kernel import Kernel
from onboard.ops.cuda.nvrtc import compiled
from onboard.ops.linear.activation import number_in_cuda
from onboard.ops.linear.fp8_linear import BLOCK
from onboard.ops.triton.launch import runs_hopper_code

_MOST_ROWS = 64
"""For which it was measured beside Triton's kernel."""
_EACH = 8
"""Columns of a thread."""
_MOST_THREADS, _MOST_CLUSTER = 1024, 8


@dataclass(frozen=True)
class Form:
    """What the kernel is compiled for; its macros have these names."""

    threads: int
    cluster: int
    has_norm: bool
    activation: int
    given: bool
    grouped: bool
    early: bool

    def macros(self) -> dict[str, int]:
        """Return what the source is told."""
        names = (name.upper() for name in self.__dataclass_fields__)
        return dict(zip(names, map(int, astuple(self)), strict=True))


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "x", "norm", "given")),
        ("columns", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


def suits(x: Tensor, norm: Tensor | None, act: str) -> bool:
    """Whether the kernel quantises these rows, or gates and what they multiply, in bfloat16."""
    columns = x.shape[1] // 2 if act else x.shape[1]
    read = (x,) if norm is None else (x, norm)
    return (
        len(x) <= _MOST_ROWS
        and runs_hopper_code(x.device)
        and columns % BLOCK == 0
        and columns <= _EACH * _MOST_THREADS * _MOST_CLUSTER
        and all(t.dtype == torch.bfloat16 and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in read)
    )  # fmt: skip


def cuda_quantise(
    x: Tensor,
    how: str,
    given: Tensor | None,
    norm: Tensor | None,
    eps: float,
    act: str,
    early: bool,
) -> tuple[Tensor, Tensor]:
    """Return what `fp8_kernels.quantise` does."""
    rows, columns = len(x), x.shape[1] // 2 if act else x.shape[1]
    grouped = how == "group"
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, columns // BLOCK if grouped else 1, device=x.device)
    form = form_of(columns, how, norm is not None, act, early)
    pointers = (None if t is None else t.data_ptr() for t in (codes, scales, x, norm, given))
    arguments = _Arguments(*pointers, columns, eps)
    _kernel(form, x.device).launch((rows * form.cluster, 1), arguments, form.cluster)
    return codes, scales if grouped else scales.view(rows)


@cache
def form_of(columns: int, how: str, has_norm: bool, act: str, early: bool) -> Form:
    """Return what the kernel is compiled for: of as few programs a row as have threads for it."""
    cluster = 1
    while columns > _EACH * _MOST_THREADS * cluster:
        cluster *= 2
    threads = 32 * -(-columns // (_EACH * 32 * cluster))
    return Form(
        threads, cluster, has_norm, number_in_cuda(act), how == "tensor", how == "group", early
    )


@cache
def _kernel(form: Form, device: torch.device) -> Kernel:
    code = compiled(source(), form.macros(), "sm_90a")
    with torch.cuda.device(device):
        return Kernel(code, "fp8_codes", form.threads, 0)


def source() -> str:
    """Return the kernel's source."""
    return Path(__file__).with_name("fp8_codes.cu").read_text(encoding="utf-8")
