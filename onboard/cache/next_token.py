"""From the input ids of a step to the next token of each sequence, all on the device.

What a step chose is kept there by slot, so that the next step can be started before the host has
seen it: a known token is its id, and one that only the device knows is its sequence's slot,
negated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from onboard.cache.step_buffer import CHOICE_NAMES
from onboard.modeling import ONE_CODEBOOK, Codebooks
from onboard.ops import has_triton
from onboard.ops.sampling.sampling import NOT_A_TOKEN, choose_tokens

Chosen = tuple[Tensor, Callable[[], Tensor]]
"""A step's tokens, and what returns the logits that they were chosen from."""


class LatestTokens:
    """The token that was chosen last for the sequence of each slot; `slots` as in
    `Limits.num_slots`.
    """

    def __init__(
        self, slots: int, device: torch.device, codebooks: Codebooks = ONE_CODEBOOK
    ) -> None:
        self.codebooks = codebooks
        self.by_slot = torch.zeros(slots, dtype=torch.int64, device=device)
        # A row of logits is a token's
        kernels = device.type == "cuda" and has_triton() and self.codebooks.count == 1
        self._kernels: Any = (
            import_module("onboard.ops.sampling.triton_sampling") if kernels else None
        )
        landed = torch.zeros((slots, 2), dtype=torch.int64, pin_memory=True) if kernels else None
        self._landed = landed
        self.landed = None if landed is None else landed.numpy()
        """Where kernels write tokens for the host, by slot: the one behind an even and that behind
        an odd number of tokens, so that a token stays while the next step runs. None: nothing
        does."""

    def fill(self, input_ids: Tensor) -> Tensor:
        """Return the row of tokens with those in place that the host did not know."""
        if self._kernels is not None:
            filled: Tensor = self._kernels.fill(input_ids, self.by_slot)
            return filled
        return torch.where(input_ids < 0, self.by_slot[(-input_ids).clamp(min=0)], input_ids)

    def choose(
        self, logits: Tensor, args: Mapping[str, Tensor], *, drawn: bool, filtered: bool
    ) -> Tensor:
        """Choose a token for each row of logits and keep it; `drawn` and `filtered` are those of
        `choose_tokens`.
        """
        how, slots, lengths = (
            [args[name] for name in CHOICE_NAMES],
            args["state_slots"],
            args["kv_lens"],
        )
        if self._kernels is not None:
            chosen: Tensor = self._kernels.choose_and_keep(
                logits, *how, self.by_slot, self._landed, slots, lengths
            )
            return chosen
        tokens = choose_codes(logits, how, self.codebooks, drawn=drawn, filtered=filtered)
        # What is no token must not be looked up by the next step
        self.by_slot[slots] = tokens.clamp(min=0)
        return tokens

    def run(
        self,
        gm: nn.Module,
        args: Mapping[str, Tensor],
        names: Sequence[str],
        *,
        drawn: bool = True,
        filtered: bool = True,
    ) -> tuple[Tensor, Any]:
        """Run `gm`, which takes the inputs `names`; return a token a sequence, padding included,
        and its output.

        `args` holds these inputs, `CHOICE_NAMES`, `state_slots` and `kv_lens`.
        """
        output = gm(
            **{name: args[name] for name in names} | {"input_ids": self.fill(args["input_ids"])}
        )
        wanted = wanted_logits(output, args, names)
        return self.choose(wanted, args, drawn=drawn, filtered=filtered), output


def choose_codes(
    logits: Tensor,
    how: Sequence[Tensor],
    codebooks: Codebooks,
    *,
    drawn: bool = True,
    filtered: bool = True,
) -> Tensor:
    """Return the next token of each row of logits, [rows], a code of each codebook by itself; as
    `choose_tokens` does.

    `how` are its other arguments; of uniform numbers there are [rows, codebooks].
    """
    if codebooks.count == 1:
        return choose_tokens(logits, *how, drawn=drawn, filtered=filtered)
    *parameters, uniform = how
    each = [
        *(parameter.repeat_interleave(codebooks.count) for parameter in parameters),
        uniform.flatten(),
    ]
    rows = codebooks.split(logits).flatten(0, 1)
    codes = choose_tokens(rows, *each, drawn=drawn, filtered=filtered).view(-1, codebooks.count)
    return torch.where((codes >= 0).all(dim=-1), codebooks.pack(codes), NOT_A_TOKEN)


class ChoosesTokens(nn.Module):
    """A graph that has captured some steps as a whole, the choice of tokens included."""

    def next_tokens(
        self, inputs: Mapping[str, Tensor], caches: Mapping[str, Tensor]
    ) -> tuple[Tensor, Any] | None:
        """Do what `LatestTokens.run` does for a captured step, and return None for any other.

        What was captured is the step that has these very mappings: `SequenceInfo.inputs`, and the
            caches.
        """
        raise NotImplementedError


def wanted_logits(output: Any, args: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return the logits [wanted rows, vocabulary] of an output; a graph that gathers has no
    others.
    """
    logits: Tensor = getattr(output, "logits", output)[0]
    return logits if "logits_gather_indices" in names else logits[args["logits_gather_indices"]]
