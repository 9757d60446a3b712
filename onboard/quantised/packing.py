"""Small integers out of larger ones."""

from __future__ import annotations

import math

import torch


def unpacked(words: torch.Tensor, bits: int, dim: int, *, run_on: bool = True) -> torch.Tensor:
    """Return the unsigned numbers of `bits` bits that lie along `dim` of int32 words, the lowest
    bits first: uint8, `32 / bits` as many. Numbers of 3, 5, 6 and 7 bits run on in the next word, and
    the last words are filled up with zeros; without `run_on` the bits that are left of a word are none.
    """
    # Words, until a number begins where a word does
    period = bits // math.gcd(bits, 32) if run_on else 1
    rows, count = words.movedim(dim, -1), 32 * period // bits
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % period))
    rows = rows.reshape(*rows.shape[:-1], -1, period)
    spread = torch.empty(*rows.shape[:-1], count, device=words.device, dtype=torch.uint8)
    for place in range(count):  # one by one: a word takes four times a number's room
        word, shift = divmod(bits * place, 32)
        number = rows[..., word] >> shift
        if (there := 32 - shift) < bits:
            number = number & ((1 << there) - 1) | rows[..., word + 1] << there
        spread[..., place] = number & ((1 << bits) - 1)
    return spread.flatten(-2).movedim(-1, dim)


def unpacked_planes(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the unsigned numbers whose bits lie in planes: of each 32 numbers the lowest bits in one
    after another of `bits` words along `dim`, as many as are a power of two, then those above.
    """
    rows = words.movedim(dim, -1)
    rows = rows.reshape(*rows.shape[:-1], -1, bits)
    found = torch.zeros(*rows.shape[:-1], 32, device=words.device, dtype=torch.uint8)
    offset = 0
    for width in (each for each in (8, 4, 2, 1) if bits & each):
        found |= unpacked(rows[..., offset : offset + width], width, -1) << offset
        offset += width
    return found.flatten(-2).movedim(-1, dim)


def one_more(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return int32 words of which each number is one more: 0 that was made one less took of the number
    above, which gets it back.
    """
    ones: int = sum(1 << shift for shift in range(0, 32, bits))
    return words + ones  # what does not fit wraps around


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the two halves of each byte of the last dimension, the low one first: uint8, twice as
    many.
    """
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 numbers that are stored with half of their range added: int8."""
    return (codes - (1 << (bits - 1))).view(torch.int8)  # what is below 0 wraps around


def twos_complement(nibble: torch.Tensor) -> torch.Tensor:
    """Return four-bit numbers in two's complement: int8."""
    wide = nibble.to(torch.int16)
    return torch.where(wide > 7, wide - 16, wide).to(torch.int8)


def exponents(codes: torch.Tensor) -> torch.Tensor:
    """Return the powers of two that eight-bit exponents stand for (E8M0): float32."""
    return torch.exp2(codes.to(torch.float32) - 127.0)


def numbers(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; of uint8 they are exponents."""
    return exponents(scale) if scale.dtype == torch.uint8 else scale.float()
