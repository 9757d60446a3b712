"""Is what the command left behind transformers' model? Asked in a process that has seen nothing of
how it was made.

`LLM` from the root as it was left, against transformers' own model of the same checkpoint (float32,
eager), on prompts that nobody has seen before. Nothing that the tool found, compared or wrote down
is read.

- Prefill: the logits of every token of each prompt.
- Greedy decode, all prompts in one ragged batch, then the longer half of them: each token has to be
  transformers' choice given the same prefix. It counts as that when transformers' logit of it lies
  below the best one by no more than `SAME` of the row's spread (best minus least): two logits
  nearer than that are a tie that rounding decides. The log-probabilities that it was chosen by have
  to be transformers', too.

A text ends behind a token that is no text (padding, the place of an image): of what comes after it
transformers makes something else. What transformers says of a prefix may depend on how long the
text is; where its logits of a prompt change when the text goes on, every prefix is given to it by
itself. Where that is so of repeated tokens alone, it takes any of equals, and texts in which no
token comes twice are compared: of those that it lacks, the likeliest goes on.

Where too few tokens were text, more prompts are drawn. Where an error is beyond the limit,
transformers' model in float64 says whose rounding it is: ours may err by a fifth more than
transformers' own float32 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from onboard.errors import OnboardError
from onboard.graph.sharding.apply import IndivisibleError
from onboard.hf.codebooks import codebooks_of, with_tokens
from onboard.hf.hf_model import without_missing_towers
from onboard.modeling import Codebooks
from onboard.runtime.llm import LLM
from onboard.runtime.ranks.division import Division
from onboard.runtime.sampling_params import SamplingParams
from onboard.testing import continue_distinct
from onboard.verify.error import rmse_ratio
from onboard.verify.rounding.against_float64 import Rounding, rounding
from onboard.verify.rounding.in_float64 import InFloat64
from onboard.verify.seeds import fresh_seed
from onboard.verify.tolerances import SAME
from onboard.workflow.sweep.inputs.judge_prompts import (
    draw_prompts,
    is_arbitrary,
    longest_read,
    places,
    text_logits,
    text_of,
)
from onboard.workflow.sweep.verdict import NEW_TOKENS, Verdict

_DEAD = -1e30
"""A logit below it is a token that the model itself forbids."""
_MOST_DRAWS = 5
"""Times that prompts are drawn, at most, until enough of what follows them is text."""
_PAGES_OF_ONE = {"kv_cache_config": {"tokens_per_block": 1}}
"""Then a text that goes on by one token is decoded, however its tokens are chosen: the others are
in the cache.
"""


@torch.inference_mode()
def judge(
    checkpoint: Path,
    root: Path,
    device: str = "cpu",
    seed: int | None = None,
    world_size: int = 1,
) -> Verdict:
    """Compare what `LLM` gives for `checkpoint` under `root`, on as many ranks, with transformers;
    `seed` None: a fresh one.
    """
    seed = fresh_seed() if seed is None else seed
    verdict = Verdict(seed=seed, world_size=world_size)
    try:
        with closing(_Judging(checkpoint, root, device, verdict)) as judging:
            judging.run(seed)
    except IndivisibleError as error:
        verdict.refused = " ".join(str(error).split())
    except OnboardError as error:
        verdict.error = " ".join(str(error).split())
    except Exception as error:  # whatever a model's code raises: there is no agreement
        verdict.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return verdict


def load_transformers(checkpoint: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return transformers' model of a checkpoint, of the class that its config names: eager, to
    evaluate.
    """
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    named = [getattr(transformers, name, None) for name in config.architectures or []]
    model_class = next((item for item in named if item is not None), AutoModelForCausalLM)
    options: dict[str, Any] = {
        "attn_implementation": "eager",
        "local_files_only": True,
        "trust_remote_code": False,
    }
    with without_missing_towers():
        model = model_class.from_pretrained(checkpoint, dtype=dtype, **options)
    return with_tokens(model).eval()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Compared:
    """Rows of ours and of transformers' float32, [rows, vocabulary], and how to ask another model
    for them.
    """

    ours: torch.Tensor
    theirs: torch.Tensor
    ask: Callable[[nn.Module], torch.Tensor]


class _Judging:
    """One comparison: the models, the texts, and the rows found."""

    def __init__(self, checkpoint: Path, root: Path, device: str, verdict: Verdict) -> None:
        self.checkpoint, self.verdict = checkpoint, verdict
        self.theirs = load_transformers(checkpoint)
        self.codebooks = codebooks_of(self.theirs)
        self.places, self.words = _words(self.theirs, self.codebooks)
        load = partial(
            LLM,
            checkpoint,
            root=root,
            device=device,
            dtype="float32",
            world_size=verdict.world_size,
        )
        self.ours: LLM = load()
        if self.ours.ranks is not None:
            _describe(self.ours.ranks.division, verdict)
        self.room = longest_read(self.theirs, self.ours.engine.capacity, self.words[-1])
        verdict.distinct = is_arbitrary(self.theirs, self.words, self.room - 1, verdict.seed or 0)
        if verdict.distinct:
            self.ours.close()
            self.ours = load(config=_PAGES_OF_ONE)
        self.prefill: list[_Compared] = []
        self.decoded: list[_Compared] = []
        self.gaps: list[float] = []

    def close(self) -> None:
        """End what ran on other ranks."""
        self.ours.close()

    def run(self, seed: int) -> None:
        """Compare texts, others as well where too few tokens were text, and fill in the verdict."""
        verdict = self.verdict
        while not verdict.draws or (not verdict.enough and verdict.draws < _MOST_DRAWS):
            prompts = draw_prompts(self.room, self.words, seed + verdict.draws, verdict.distinct)
            verdict.lengths = verdict.lengths or [len(prompt) for prompt in prompts]
            verdict.draws += 1
            self.read(prompts)
            verdict.tokens = len(self.gaps)
        verdict.largest_gap = _worst(self.gaps)
        verdict.differing = sum(not gap <= SAME for gap in self.gaps)
        verdict.prefill_error, verdict.prefill_rounding = self.errors(
            self.prefill, lambda rows: rows
        )
        verdict.decode_error, verdict.decode_rounding = self.errors(self.decoded, _centred)

    def read(self, prompts: list[list[int]]) -> None:
        """Add what both models say of prompts, and of what ours goes on with."""
        expected = [text_logits(self.theirs, prompt) for prompt in prompts]
        for prompt, theirs in zip(prompts, expected, strict=True):
            self.prefill.append(
                _Compared(self.ours.logits(prompt), theirs, partial(text_logits, tokens=prompt))
            )
        size = expected[0].shape[-1]
        # Ragged, then more even lengths
        for chosen in (
            range(len(prompts)),
            range(len(prompts) // 2, len(prompts)),
        ):
            batch = [prompts[index] for index in chosen]
            for index, (tokens, found) in zip(chosen, self.go_on(batch, size), strict=True):
                rows = next_logits(self.theirs, prompts[index], tokens, expected[index])
                asked = partial(
                    _asked, prompt=prompts[index], tokens=tokens, codebooks=self.codebooks
                )
                self.decoded.append(
                    _Compared(
                        _each(found, self.codebooks), _log_softmax(rows, self.codebooks), asked
                    )
                )
                rows = _lacking(rows, prompts[index], tokens) if self.verdict.distinct else rows
                codes = (
                    self.codebooks.unpack(torch.tensor(tokens, dtype=torch.long)).flatten().tolist()
                )
                self.gaps += _gaps(_each(rows, self.codebooks), codes)

    def go_on(self, batch: list[list[int]], size: int) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield each prompt's greedy tokens, and the log-probabilities of their rows [tokens,
        vocabulary].
        """
        if self.verdict.distinct:
            found = continue_distinct(self.ours, batch, NEW_TOKENS, size)
        else:
            params = SamplingParams(
                max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=size
            )
            found = [
                (output.token_ids, output.logprobs or [])
                for output in self.ours.generate(batch, params)
            ]
        for tokens, logprobs in found:
            text = text_of(tokens, self.places)
            yield text, torch.stack([_row(each, size) for each in logprobs[: len(text)]])

    def errors(
        self, compared: list[_Compared], by: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[float | None, Rounding | None]:
        """Return the largest error of a text; beyond the limit, also both models' errors against
        float64.
        """
        worst = _worst([relative_error(by(each.ours), by(each.theirs)) for each in compared])
        if worst is None or worst <= SAME:
            return worst, None
        exact = InFloat64(load_transformers(self.checkpoint, torch.float64))
        return worst, rounding(
            (by(each.ours) for each in compared),
            (by(each.theirs) for each in compared),
            (by(each.ask(exact)) for each in compared),
            relative_error,
        )


def _describe(division: Division, verdict: Verdict) -> None:
    """Note what ranks divide. Raises `OnboardError` where that is nothing: what is equal then says
    nothing of ranks.
    """
    if not sum(division.weights.values()):
        raise OnboardError(f"{division.world_size} ranks divide nothing of it")
    verdict.divided, verdict.weights = dict(division.weights), division.all_weights


def _words(model: nn.Module, codebooks: Codebooks) -> tuple[set[int], Sequence[int]]:
    """Return the tokens that are no text, and those that are; of codes of several codebooks all
    are.
    """
    if codebooks.count > 1:
        return set(), range(codebooks.tokens)
    config: PretrainedConfig = model.config
    no_text = set(places(config.to_dict()))
    return no_text, [
        token
        for token in range(config.get_text_config(decoder=True).vocab_size)
        if token not in no_text
    ]


def _asked(
    model: nn.Module, prompt: list[int], tokens: list[int], codebooks: Codebooks
) -> torch.Tensor:
    """Return a model's log-probabilities; in float32 those of flat distributions have few digits of
    what differs.
    """
    return _log_softmax(next_logits(model, prompt, tokens, text_logits(model, prompt)), codebooks)


def _each(rows: torch.Tensor, codebooks: Codebooks) -> torch.Tensor:
    """Return a row for each codebook of each token, [tokens * codebooks, codes]: each is a
    distribution of its own.
    """
    return codebooks.split(rows).flatten(0, 1)


def _log_softmax(rows: torch.Tensor, codebooks: Codebooks) -> torch.Tensor:
    return _each(rows, codebooks).log_softmax(-1)


def next_logits(
    model: nn.Module, prompt: list[int], tokens: list[int], own: torch.Tensor
) -> torch.Tensor:
    """Return transformers' logits of each of `tokens`, given what comes before it, [tokens,
    vocabulary].

    `own` are those of the prompt by itself. One pass over the whole text gives them all, unless
    they show that what is said of a prefix depends on how the text goes on.
    """
    whole = text_logits(model, [*prompt, *tokens])
    if relative_error(whole[: len(prompt)], own) <= SAME:
        return whole[len(prompt) - 1 : -1]
    return torch.stack(
        [text_logits(model, [*prompt, *tokens[:count]])[-1] for count in range(len(tokens))]
    )


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return rmse(ours - theirs) / rmse(theirs) of two [rows, vocabulary]; infinite where shapes
    differ.

    Tokens that transformers' model forbids have to be forbidden, and are left out. NaN stays NaN.
    """
    if ours.shape != theirs.shape:
        return float("inf")
    dead = theirs < _DEAD
    if not torch.equal(ours < _DEAD, dead):
        return float("nan") if bool(ours.isnan().any()) else float("inf")
    return rmse_ratio(ours[~dead], theirs[~dead])


def _centred(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of log-probabilities less their means, so that what all have in common does not
    count.
    """
    alive = rows >= _DEAD
    mean = torch.where(alive, rows, 0).sum(-1, keepdim=True) / alive.sum(-1, keepdim=True)
    return torch.where(rows < _DEAD, rows, rows - mean)


def _gaps(rows: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    alive = torch.where(rows < _DEAD, float("inf"), rows)
    best, least = rows.amax(-1), alive.amin(-1)
    chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)]
    gaps: list[float] = ((best - chosen) / (best - least)).tolist()
    return gaps


def _lacking(rows: torch.Tensor, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the rows without the tokens that the text has by then, none of which may be chosen."""
    rows = rows.clone()
    for index in range(len(tokens)):
        rows[index, [*prompt, *tokens[:index]]] = -torch.inf
    return rows


def _row(logprobs: dict[int, float], vocabulary: int) -> torch.Tensor:
    row = torch.full((vocabulary,), float("nan"))
    for token, value in logprobs.items():
        row[token] = value
    return row


def _worst(values: Sequence[float]) -> float | None:
    """Return the largest value; None where one is no finite number, or there is none."""
    finite = bool(values) and bool(torch.tensor(values).isfinite().all())
    return max(values) if finite else None
