"""What the launchers of all kernels share."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from onboard.errors import OnboardError

INTERPRETED = not isinstance(tl.cdiv, JITFunction)
"""Whether Triton was imported with TRITON_INTERPRET=1: kernels then run on the CPU, slowly, for
tests.
"""

PROCESSORS_INTERPRETED = 4
SHARED_MEMORY_INTERPRETED = 227 * 1024

_DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
TYPES = {**_DOT_TYPES, torch.float64: tl.float64}
"""Dtypes as Triton names them."""
_DOT_TYPES[torch.float8_e4m3fn] = tl.float8e4nv
if INTERPRETED:  # the interpreter has no products of bfloat16 or float8
    _DOT_TYPES = dict.fromkeys(_DOT_TYPES, tl.float32)
_DOT_TYPES[torch.int8] = tl.int8


def require_device(x: Tensor) -> None:
    """Refuse a tensor that no kernel can reach.

    Raises:
        OnboardError: it is not on a CUDA device, and kernels are not interpreted.
    """
    if x.device.type != "cuda" and not INTERPRETED:
        raise OnboardError(
            f"a triton op got a tensor on {x.device}",
            hint="Use the torch op of the same name, or set TRITON_INTERPRET=1 before triton is imported",
        )


def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors."""
    if device.type != "cuda":
        return PROCESSORS_INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return SHARED_MEMORY_INTERPRETED
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def overlaps(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that may start before the one before it has ended.

    It then calls `gdc_wait` before it touches what others write (programmatic dependent launch,
    from compute capability 9.0 on).
    """
    return {"OVERLAP": True, "launch_pdl": True} if is_hopper(device) else {"OVERLAP": False}


def copies_tiles(device: torch.device) -> bool:
    """Tell whether kernels can address tensors by descriptors, of which the hardware copies tiles."""
    return INTERPRETED or is_hopper(device)


@cache  # asking takes longer than launching
def is_hopper(device: torch.device) -> bool:
    """Whether it has compute capability 9.0 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def runs_hopper_code(device: torch.device) -> bool:
    """Whether it runs what is compiled for Hopper GPUs alone: others, also newer ones, have other
    instructions for matrices.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return int(triton.next_power_of_2(size))


def power_of_two_in(size: int) -> int:
    """Return the largest power of two that is not above `size`, or 1."""
    return 1 << max(1, size).bit_length() - 1


def tile_width(size: int) -> int:
    """Return the width of a matrix tile that holds `size` channels; the hardware's products start
    at 16.
    """
    return max(16, power_of_two(size))


def last_contiguous(x: Tensor) -> Tensor:
    """Return x, copied only if its last dimension has gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type of the operands of matrix products over tensors of this dtype."""
    return _DOT_TYPES[dtype]


def splits_for(wanted: int, most_keys: int, tile: int, most: int) -> int:
    """How many programs share a sequence's keys: a power of two, from shapes alone, so that a graph
    may bake it in.
    """
    most_useful: int = min(wanted, triton.cdiv(most_keys, tile), most)
    return power_of_two_in(most_useful)
