"""Inline assembly run on numbers of this machine: the few instructions of PTX that decode weights.

PTX ISA 8.7, sections 9.7.1 (`fma` of bf16x2), 9.7.8 (`lop3`, `shl`) and 9.7.9 (`prmt`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

_MASK = (1 << 32) - 1


def run(text: str, *inputs: int, outputs: int = 2) -> list[int]:
    """Return what assembly leaves in $0, $1, ... of 32 bits each; inputs follow behind these.

    A product and sum that bfloat16 has not exactly is an `InexactError`.
    """
    found = {f"${outputs + place}": value & _MASK for place, value in enumerate(inputs)}
    for line in re.findall(r"[^{};]+(?=;)", text):
        name, *operands = line.replace(",", " ").split()
        if not name.startswith("."):
            target, *sources = operands
            values = [found[each] if each in found else int(each, 0) for each in sources]
            found[target] = _instruction(name, values)
    return [found[f"${place}"] for place in range(outputs)]


class InexactError(ArithmeticError):
    """A result had to be rounded."""


def _instruction(name: str, values: Sequence[int]) -> int:
    match name:
        case "mov.b32":
            return values[0]
        case "shl.b32":
            return values[0] << values[1] & _MASK
        case "shr.u32":
            return values[0] >> values[1]
        case "and.b32":
            return values[0] & values[1]
        case "lop3.b32":
            return _any_function(*values)
        case "prmt.b32":
            return _chosen_bytes(*values)
        case "fma.rn.bf16x2":
            return sum(_fma([each >> low for each in values]) << low for low in (0, 16))
    raise AssertionError(f"no instruction {name}")


def _any_function(a: int, b: int, c: int, table: int) -> int:
    bits = (
        (table >> ((a >> place & 1) << 2 | (b >> place & 1) << 1 | c >> place & 1) & 1) << place
        for place in range(32)
    )
    return sum(bits)


def _chosen_bytes(a: int, b: int, chosen: int) -> int:
    both = b << 32 | a
    return sum((both >> 8 * (chosen >> 4 * place & 7) & 255) << 8 * place for place in range(4))


def _fma(halves: Sequence[int]) -> int:
    a, b, c = (bfloat16(each) for each in halves)
    exact = a * b + c  # of 8 bits by 8 bits: float64 has it
    rounded = torch.tensor(exact, dtype=torch.float64).to(torch.bfloat16)
    if float(rounded) != exact:
        raise InexactError(f"{a} * {b} + {c}")
    return int(rounded.view(torch.int16)) & 0xFFFF


def bfloat16(bits: int) -> float:
    """Return what the lower 16 bits of a number stand for."""
    return float(
        torch.tensor(((bits & 0xFFFF) ^ 0x8000) - 0x8000, dtype=torch.int16).view(torch.bfloat16)
    )


def bits_of(number: float) -> int:
    """Return a number twice, as bf16x2; it has to be exact."""
    half = torch.tensor(number, dtype=torch.float64).to(torch.bfloat16)
    assert float(half) == number
    return (int(half.view(torch.int16)) & 0xFFFF) * 0x10001
