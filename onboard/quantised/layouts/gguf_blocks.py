"""GGUF's blocks as codes, scales and offsets.

Layouts: ggml's `block_q4_0`, `block_q4_K`, ... (https://github.com/ggml-org/ggml,
src/ggml-common.h). A block of 32 has a scale in float16, and some an offset. A super-block of 256
has scales of its sub-blocks of 32 or 16, small integers, and what these are multiplied by: here both
are one scale in float32, and one offset, for each sub-block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from onboard.errors import OnboardError
from onboard.quantised.encoded import Encoded
from onboard.sources.gguf_package import gguf

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [rows, blocks, elements], scale and offset [rows, blocks, sub-blocks]."""


def decode(kind: str, data: torch.Tensor) -> Encoded:
    """Return rows [..., outputs, bytes] uint8 of a type, by its name, as codes and scales.

    Types without that form are dequantised by the gguf package: their codes are their values.
    """
    if kind not in _BLOCKS:
        return _dequantised(kind, data)
    size, layout = _BLOCKS[kind]
    blocks = data.view(*data.shape[:-1], -1, size)
    codes, scale, offset = layout(blocks)
    columns = codes.shape[-1] // scale.shape[-1]
    joined = None if offset is None else offset.flatten(-2)
    return Encoded(codes.flatten(-2).contiguous(), scale.flatten(-2), 1, columns, joined)


def require_decoder(kind: str) -> None:
    """Raise `OnboardError` for a type that nobody can dequantise."""
    package = gguf()
    kinds = {each.name: each for each in package.GGML_QUANT_SIZES}
    try:
        _, size = package.GGML_QUANT_SIZES[kinds[kind]]
        package.dequantize(np.zeros((1, size), dtype=np.uint8), kinds[kind])
    except NotImplementedError as error:
        raise OnboardError(
            f"the GGUF file has weights of the type {kind}, which onboard cannot read",
            hint="Use another release of the model",
        ) from error


def _dequantised(kind: str, data: torch.Tensor) -> Encoded:
    package = gguf()
    values = package.dequantize(data.cpu().numpy(), package.GGMLQuantizationType[kind])
    codes = torch.from_numpy(values).to(data.device)
    ones = torch.ones(*codes.shape[:-1], 1, device=data.device)
    return Encoded(codes, ones, 1, codes.shape[-1])


def _half(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """Return the float16 that begins at a byte of each block, as one float32 [..., 1]."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).float()


def _split_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low halves of all bytes, then the high ones."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _split_nibbles(blocks[..., 2:]).to(torch.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _split_nibbles(blocks[..., 4:]).to(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    """Return 32 bits of four bytes, the lowest first, each worth 16."""
    shifts = torch.arange(8, device=data.device, dtype=torch.uint8)
    return ((data.unsqueeze(-1) >> shifts & 1) << 4).flatten(-2)


def _q5_0(blocks: torch.Tensor) -> Parts:
    codes = _split_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return codes.to(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    codes = _split_nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return codes.to(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0), None


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and eight minima of six bits in twelve bytes: the last four of each
    have their low bits in the last bytes, and their high ones in the upper bits of the others.
    """
    first, second, low = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, low & 15 | (first >> 6) << 4], dim=-1)
    minima = torch.cat([second & 63, low >> 4 | (second >> 6) << 4], dim=-1)
    return scales.float(), minima.float()


def _offset_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales, minima = _six_bits(blocks[..., 4:16])
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: torch.Tensor) -> Parts:
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    codes = _split_nibbles(pairs).flatten(-2)
    return codes.to(torch.int8), *_offset_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    high, low = blocks[..., 16:48], blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8).unsqueeze(-1)
    fifth = (high.unsqueeze(-2) >> shifts & 1).flatten(-2) << 4
    return (_split_nibbles(low).flatten(-2) | fifth).to(torch.int8), *_offset_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    shifts = torch.arange(0, 8, 2, device=blocks.device, dtype=torch.uint8).unsqueeze(-1)
    upper = ((high >> shifts & 3) << 4).flatten(-2)
    codes = (_split_nibbles(low) | upper).flatten(-2).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return codes, _half(blocks, 208) * scales, None


_BLOCKS: dict[str, tuple[int, Callable[[torch.Tensor], Parts]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and how they lie in it."""
