"""Weights in the K types of GGUF by the weights alone: super-blocks of 256 inputs, as the gguf package
decodes them. llama.cpp searches for better scales; here a block's scale is that of its range.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SUPER = 256
"""Inputs of a super-block."""
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def k_blocks(rows: Floats, kind: str) -> Bytes:
    """Return rows [outputs, inputs], inputs a multiple of 256, in "Q4_K", "Q5_K" or "Q6_K": bytes
    [outputs, bytes of a row].
    """
    blocks = rows.reshape(-1, SUPER)
    data = _with_minima(blocks, int(kind[1])) if kind != "Q6_K" else _symmetric(blocks)
    return data.reshape(len(rows), -1)


def _with_minima(blocks: Floats, bits: int) -> Bytes:
    """Return Q4_K or Q5_K: 8 blocks of 32, a scale and a minimum of six bits each."""
    parts = blocks.reshape(-1, 8, 32)
    low = np.minimum(parts.min(-1), 0)
    steps = (parts.max(-1).clip(min=0) - low) / (2**bits - 1)
    scale, scales = _sixths(steps)
    least, minima = _sixths(-low)
    step = (scale * scales)[..., None]
    raised = parts + (least * minima)[..., None]
    codes = np.divide(raised, step, out=np.zeros_like(parts), where=step > 0).round()
    codes = codes.clip(0, 2**bits - 1).astype(np.uint8)
    halves = [_half(scale), _half(least), _six_bits(scales, minima)]
    fifth = [_planes(codes >> 4, 8, 1).reshape(-1, 32)] if bits == 5 else []
    pairs = codes.reshape(-1, 4, 2, 32) & 15
    low_bits = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, SUPER // 2)
    return np.concatenate([*halves, *fifth, low_bits], axis=1)


def _sixths(values: Floats) -> tuple[Floats, Bytes]:
    """Return scales [blocks, 1], as 16 bits hold them, and values in six bits of them."""
    scale = (values.max(-1, keepdims=True) / 63).astype(np.float16).astype(np.float32)
    codes = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0).round()
    return scale, codes.clip(0, 63).astype(np.uint8)


def _six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """Return 8 scales and 8 minima of six bits in 12 bytes: the upper two bits of the second four lie
    in the first eight bytes.
    """
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def _symmetric(blocks: Floats) -> Bytes:
    """Return Q6_K: 16 blocks of 16, a scale of eight bits each."""
    parts = blocks.reshape(-1, 16, 16)
    steps = np.abs(parts).max(-1) / 31.5
    scale = (steps.max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    scales = (
        np.divide(steps, scale, out=np.zeros_like(steps), where=scale > 0).round().clip(max=127)
    )
    step = (scale * scales)[..., None]
    codes = np.divide(parts, step, out=np.zeros_like(parts), where=step > 0).round()
    codes = (codes.clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    nibbles = codes & 15
    low = nibbles[:, :, :2] | nibbles[:, :, 2:] << 4
    high = _planes(codes >> 4, 4, 2)
    data = [low.reshape(-1, 128), high.reshape(-1, 64), scales.astype(np.uint8), _half(scale)]
    return np.concatenate(data, axis=1)


def _planes(codes: Bytes, count: int, bits: int) -> Bytes:
    """Return `count` numbers of `bits` bits, [..., count, 32], in 32 bytes, the first lowest."""
    planes = codes.reshape(-1, count, 32)
    found = np.zeros_like(planes[:, 0])
    for index in range(count):
        found |= planes[:, index] << bits * index
    return found


def _half(scale: Floats) -> Bytes:
    return np.ascontiguousarray(scale.astype(np.float16)).view(np.uint8)
