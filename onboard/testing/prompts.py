"""Random inputs of an equivalence test, from a seed that a failure can be repeated with."""

from __future__ import annotations

import os
import secrets

import torch


def fresh_seed() -> int:
    """Return the seed in the environment variable ONBOARD_SEED, a random one without it; print which it is."""
    seed = int(os.environ.get("ONBOARD_SEED") or secrets.randbelow(2**31))
    print(f"ONBOARD_SEED={seed}")
    return seed


def random_prompt(
    vocab_size: int, batch: int, length: int, seed: int, start: int = 0, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """Return random `input_ids` and `position_ids`, both [batch, length] int64.

    The positions of each row go up by one from a random place in `start` + 1 to `start` + 8: a model that counts by
    itself is found out. (They have no gaps, since Hugging Face takes a gap for the start of another packed sequence.)
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(vocab_size, (batch, length), generator=generator)
    starts = start + 1 + torch.randperm(8, generator=generator)[:batch]
    position_ids = starts[:, None] + torch.arange(length)
    return {"input_ids": input_ids.to(device), "position_ids": position_ids.to(device)}
