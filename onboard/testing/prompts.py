"""Random inputs of an equivalence test, from a seed that a failure can be repeated with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onboard.verify import seeds


def fresh_seed() -> int:
    """Return the seed in the environment variable ONBOARD_SEED, a random one without it; print
    which it is.
    """
    seed = seeds.fresh_seed()
    print(f"ONBOARD_SEED={seed}")
    return seed


def random_prompt(
    vocab_size: int,
    batch: int,
    length: int,
    seed: int,
    start: int = 0,
    device: str | torch.device = "cpu",
    *,
    counted: bool = False,
    distinct: bool = False,
) -> dict[str, torch.Tensor]:
    """Return random `input_ids` and `position_ids`, both [batch, length] int64.

    Each row's positions begin at a random place in `start` + 1 to `start` + 8 and go up by one or
    two: a model that counts by itself, or only looks at the first position, is found out. The
    largest is below `start` + 8 + 2 `length`. With `counted` they are 0, 1, 2 and so on, as a
    Hugging Face model that takes no positions counts them. With `distinct` no token comes twice in
    a row.
    """
    generator = torch.Generator().manual_seed(seed)
    size = (batch, start + length if counted else length)
    if distinct:
        order = torch.rand((batch, vocab_size), generator=generator).argsort(dim=1)
        input_ids = order[:, : size[1]].clone()  # torch.export guards the base of a view
    else:
        input_ids = torch.randint(vocab_size, size, generator=generator)
    if counted:
        counts = torch.arange(start + length).expand(batch, -1).contiguous()
        return {"input_ids": input_ids.to(device), "position_ids": counts.to(device)}
    first = start + 1 + torch.randperm(8, generator=generator)[:batch, None]
    steps = torch.randint(1, 3, (batch, length - 1), generator=generator)
    position_ids = torch.cat((first, first + steps.cumsum(dim=1)), dim=1)
    return {"input_ids": input_ids.to(device), "position_ids": position_ids.to(device)}


def ragged_prompts(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Return one random prompt of each length, as token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def all_logprobs(steps: list[dict[int, float]]) -> torch.Tensor:
    """Return the log-probabilities of every token at each step, [steps, vocabulary] float32, from a
    mapping a step.
    """
    return torch.tensor([[step[token] for token in range(len(step))] for step in steps])
