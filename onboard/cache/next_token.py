"""Placeholder tokens and sampling, both on the device: from a step's input ids to each sequence's
next token.

The device keeps the latest token of each slot. So the next step can be launched before the host has
received it: the host writes a placeholder token (`-slot`) as input id, and the step's first kernel
replaces it by the slot's latest token. That is right because steps run in the order of their
launches, on one stream: the step that chose the token has finished by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from onboard.cache.step_buffer import CHOICE_NAMES, ROW_NAMES
from onboard.cache.token_masks import TokenMasks
from onboard.modeling import ONE_CODEBOOK, Codebooks
from onboard.ops import has_triton
from onboard.ops.collectives.collectives import tell
from onboard.ops.sampling.sampling import NOT_A_TOKEN, choose_tokens
from onboard.parallel.ranks import ALONE, Ranks

Chosen = tuple[Tensor, Callable[[], Tensor]]
"""A step's tokens [rows], and a function that returns the logits they were chosen from."""


class LatestTokens:
    """The latest token of each slot, on the device; `slots` is `Limits.num_slots`.

    Of ranks that are led the first chooses for all.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        codebooks: Codebooks = ONE_CODEBOOK,
        ranks: Ranks = ALONE,
    ) -> None:
        self.codebooks = codebooks
        self._ranks = ranks
        self.by_slot = torch.zeros(slots, dtype=torch.int64, device=device)
        # The kernels choose one token from each row of logits
        kernels = device.type == "cuda" and has_triton() and self.codebooks.count == 1
        self._kernels: Any = (
            import_module("onboard.ops.sampling.triton_sampling") if kernels else None
        )
        landed = torch.zeros((slots, 2), dtype=torch.int64, pin_memory=True) if kernels else None
        self._landed = landed
        self.landed = None if landed is None else landed.numpy()
        """[slots, 2] pinned host memory to which the sampling kernel writes tokens, column
        `length % 2`: so the next step, which may run before the host has read a token, writes the
        other column. None without kernels: the host then copies tokens itself."""

    def fill(self, input_ids: Tensor) -> Tensor:
        """Return the input ids with placeholder tokens (below 0) replaced by the slots' latest
        tokens.
        """
        if self._kernels is not None:
            filled: Tensor = self._kernels.fill(input_ids, self.by_slot)
            return filled
        return torch.where(input_ids < 0, self.by_slot[(-input_ids).clamp(min=0)], input_ids)

    def choose(
        self, logits: Tensor, args: Mapping[str, Tensor], *, drawn: bool, filtered: bool
    ) -> Tensor:
        """Choose a token for each row of logits and keep it by slot, without a wait for the device.

        `drawn` and `filtered` are those of `choose_tokens`.
        """
        how, (slots, lengths) = (
            [args[name] for name in names] for names in (CHOICE_NAMES, ROW_NAMES)
        )
        if self._kernels is not None:
            chosen: Tensor = self._kernels.choose_and_keep(
                logits, *how, self.by_slot, self._landed, slots, lengths
            )
            return chosen
        tokens = choose_codes(logits, how, self.codebooks, drawn=drawn, filtered=filtered)
        # NOT_A_TOKEN is below 0: the next step must not look it up in the embedding
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
        """Replace placeholder tokens, run `gm` with the inputs `names`, choose tokens; return the
        tokens [rows of logits], padding included, and the output of `gm`.

        `args` holds these inputs, `CHOICE_NAMES` and `ROW_NAMES`.
        """
        output = gm(
            **{name: args[name] for name in names} | {"input_ids": self.fill(args["input_ids"])}
        )
        wanted = wanted_logits(output, args, names)
        return self.choose_for_all(wanted, args, drawn=drawn, filtered=filtered), output

    def choose_for_all(
        self,
        logits: Tensor,
        args: Mapping[str, Tensor],
        *,
        drawn: bool = True,
        filtered: bool = True,
    ) -> Tensor:
        """Do what `choose` does, on the rank that chooses; all have its tokens behind it, if they
        need them. Of the logits of other ranks only the number of rows counts.
        """
        if self._ranks.follows:
            tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        else:
            tokens = self.choose(logits, args, drawn=drawn, filtered=filtered)
        if self._ranks.told_tokens:
            self._tell(tokens, args[ROW_NAMES[0]])
        return tokens

    def _tell(self, tokens: Tensor, slots: Tensor) -> None:
        """Give all ranks the tokens that the first one has chosen, on the devices: the next step may
        be launched before any host knows them.
        """
        tell(tokens)
        if self._ranks.follows:
            self.by_slot[slots] = tokens.clamp(min=0)


def choose_codes(
    logits: Tensor,
    how: Sequence[Tensor],
    codebooks: Codebooks,
    *,
    drawn: bool = True,
    filtered: bool = True,
) -> Tensor:
    """Return the next token of each row of logits, [rows]: `choose_tokens` for each codebook.

    `how` are the other arguments of `choose_tokens`; uniform numbers are [rows, codebooks].
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
    """A graph that has captured whole steps, sampling included."""

    def next_tokens(
        self, inputs: Mapping[str, Tensor], caches: Mapping[str, Tensor]
    ) -> tuple[Tensor, Any] | None:
        """Do what `LatestTokens.run` does by a replay; return None if the step was not captured.

        A captured step is recognised by the identity of both mappings: `SequenceInfo.inputs` and
        the caches.
        """
        raise NotImplementedError

    def choose_again(self, inputs: Mapping[str, Tensor], masks: TokenMasks) -> Tensor | None:
        """Choose the tokens of the step that was replayed last again, from the allowed ones; return
        them, [rows], or None if that was not captured.
        """
        raise NotImplementedError


def wanted_logits(output: Any, args: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return the logits [rows, vocabulary] of the tokens in `logits_gather_indices`; a graph that
    takes these indices returns no others.
    """
    logits: Tensor = getattr(output, "logits", output)[0]
    return logits if "logits_gather_indices" in names else logits[args["logits_gather_indices"]]
