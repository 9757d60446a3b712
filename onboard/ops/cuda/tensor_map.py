"""Descriptions of matrices by which the copy engine of Hopper GPUs brings tiles of them."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from onboard.ops.cuda.kernel import check, driver

_BYTES, _SWIZZLE, _WIDE_SECTORS = 0, 3, 3
"""CU_TENSOR_MAP_DATA_TYPE_UINT8, ..._SWIZZLE_128B and ..._L2_PROMOTION_L2_256B"""
SIZE = 128
"""Bytes of a row of a tile, and of a description (CUtensorMap)."""

TensorMap = ctypes.c_uint64 * (SIZE // 8)


@lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, columns: int, tile: int) -> ctypes.Array[ctypes.c_uint64]:
    """Return what describes a matrix [rows, columns] of bytes, in tiles of `tile` rows (at most 256) of
    `SIZE` bytes each. What is beyond the matrix comes as zeros; sixteenths of eight rows are exchanged,
    as tensor cores read them.

    Raises:
        OnboardError: the driver refuses.
    """
    room = (ctypes.c_uint64 * (SIZE // 8 + 8))()
    place = -ctypes.addressof(room) % 64  # the driver wants it at a multiple of 64
    described = TensorMap.from_buffer(room, place)
    sizes, strides = (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(columns)
    box, steps = (ctypes.c_uint32 * 2)(SIZE, tile), (ctypes.c_uint32 * 2)(1, 1)
    check(
        driver().cuTensorMapEncodeTiled(
            ctypes.byref(described),
            _BYTES,
            2,
            ctypes.c_void_p(address),
            sizes,
            strides,
            box,
            steps,
            0,
            _SWIZZLE,
            _WIDE_SECTORS,
            0,
        )  # fmt: skip
    )
    return described
