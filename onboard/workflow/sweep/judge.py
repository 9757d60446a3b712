"""Is what the command left behind transformers' model? Asked in a process that has seen nothing of how it was made.

`LLM` from the root as it was left, against transformers' own model of the same checkpoint (float32, eager), on prompts
that nobody has seen before. Nothing that the tool found, compared or wrote down is read.

- Prefill: the logits of every token of each prompt.
- Greedy decode, all prompts in one ragged batch, then the longer half of them: each token has to be transformers'
  choice given the same prefix. It counts as that when transformers' logit of it lies below the best one by no more than
  `LIMIT` of the row's spread (best minus least): two logits nearer than that are a tie that rounding decides. The
  log-probabilities that it was chosen by have to be transformers', too.

A text ends behind a token that is no text (padding, the place of an image): of what comes after it transformers makes
something else. What transformers says of a prefix may depend on how long the text is; where its logits of a prompt
change when the text goes on, every prefix is given to it by itself.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from onboard.errors import OnboardError
from onboard.graph.reference import without_missing_towers
from onboard.runtime.llm import LLM
from onboard.runtime.sampling import SamplingParams
from onboard.workflow.sweep.verdict import LIMIT, NEW_TOKENS, Verdict

LONGEST = 300
_STRATA = ((1, 1), (2, 5), (6, 16), (17, 48), (49, 100), (101, 200), (201, LONGEST))
"""A prompt's length is drawn from each, as far as the model has positions."""
_DEAD = -1e30
"""A logit below it is a token that the model itself forbids."""
_PLACE = re.compile(r"(?!bos_|eos_|forced_|decoder_start_|sep_|cls_)\w+_token_(id|index)")


@torch.inference_mode()
def judge(checkpoint: Path, root: Path, device: str = "cpu", seed: int | None = None) -> Verdict:
    """Compare what `LLM` gives for `checkpoint` under `root` with transformers; `seed` None: a fresh one."""
    seed = secrets.randbelow(2**31) if seed is None else seed
    verdict = Verdict(seed=seed)
    try:
        theirs = load_transformers(checkpoint)
        ours = LLM(checkpoint, root=root, device=device, dtype="float32")
        _compare(ours, theirs, verdict, seed)
    except OnboardError as error:
        verdict.error = " ".join(str(error).split())
    except Exception as error:  # whatever a model's code raises: there is no agreement
        verdict.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return verdict


def load_transformers(checkpoint: Path) -> nn.Module:
    """Return transformers' model of a checkpoint, of the class that its config names: float32, eager, to evaluate."""
    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    named = [getattr(transformers, name, None) for name in config.architectures or []]
    model_class = next((item for item in named if item is not None), AutoModelForCausalLM)
    options = {"attn_implementation": "eager", "local_files_only": True, "trust_remote_code": False}
    with without_missing_towers():
        model = model_class.from_pretrained(checkpoint, dtype=torch.float32, **options)
    return model.eval()  # type: ignore[no-any-return]


def _compare(ours: LLM, theirs: nn.Module, verdict: Verdict, seed: int) -> None:
    """Fill in the verdict."""
    config: PretrainedConfig = theirs.config
    places = set(_places(config.to_dict()))
    words = [token for token in range(config.get_text_config(decoder=True).vocab_size) if token not in places]
    prompts = draw_prompts(ours.engine.capacity, words, seed)
    verdict.lengths = [len(prompt) for prompt in prompts]
    expected = [_logits(theirs, prompt) for prompt in prompts]
    pairs = zip(map(ours.logits, prompts), expected, strict=True)
    verdict.prefill_error = _worst([relative_error(*pair) for pair in pairs])
    vocabulary = expected[0].shape[-1]
    errors: list[float] = []
    gaps: list[float] = []
    for chosen in (range(len(prompts)), range(len(prompts) // 2, len(prompts))):  # ragged, then of more even lengths
        batch = {index: prompts[index] for index in chosen}
        for index, tokens, found in _decoded(ours, batch, vocabulary, places):
            rows = next_logits(theirs, prompts[index], tokens, expected[index])
            errors.append(relative_error(_centred(found), _centred(rows)))
            gaps += _gaps(rows, tokens)
    verdict.tokens, verdict.decode_error, verdict.largest_gap = len(gaps), _worst(errors), _worst(gaps)
    verdict.differing = sum(not gap <= LIMIT for gap in gaps)


def _decoded(
    ours: LLM, batch: dict[int, list[int]], vocabulary: int, places: set[int]
) -> Iterator[tuple[int, list[int], torch.Tensor]]:
    """Yield each prompt's key, its greedy tokens, and the log-probabilities of their rows [tokens, vocabulary]."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=vocabulary)
    for index, output in zip(batch, ours.generate(list(batch.values()), params), strict=True):
        tokens = _text_of(output.token_ids, places)
        rows = [_row(each, vocabulary) for each in (output.logprobs or [])[: len(tokens)]]
        yield index, tokens, torch.stack(rows)


def draw_prompts(capacity: int, vocabulary: Sequence[int], seed: int) -> list[list[int]]:
    """Return prompts of different lengths, behind each of which the tokens that are decoded have room."""
    draw, room = random.Random(seed), max(1, capacity - NEW_TOKENS)
    strata = [(least, min(most, room)) for least, most in _STRATA if least <= room]
    return [draw.choices(vocabulary, k=draw.randint(*bounds)) for bounds in strata]


def next_logits(model: nn.Module, prompt: list[int], tokens: list[int], own: torch.Tensor) -> torch.Tensor:
    """Return transformers' logits of each of `tokens`, given what comes before it, [tokens, vocabulary].

    `own` are those of the prompt by itself. One pass over the whole text gives them all, unless they show that what is
    said of a prefix depends on how the text goes on.
    """
    whole = _logits(model, [*prompt, *tokens])
    if relative_error(whole[: len(prompt)], own) <= LIMIT:
        return whole[len(prompt) - 1 : -1]
    return torch.stack([_logits(model, [*prompt, *tokens[:count]])[-1] for count in range(len(tokens))])


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return rmse(ours - theirs) / rmse(theirs) of two [rows, vocabulary]; infinite where shapes differ.

    Tokens that transformers' model forbids have to be forbidden, and are left out. NaN stays NaN.
    """
    if ours.shape != theirs.shape:
        return float("inf")
    dead = theirs < _DEAD
    if not torch.equal(ours < _DEAD, dead):
        return float("nan") if bool(ours.isnan().any()) else float("inf")
    ours, theirs = ours[~dead].double(), theirs[~dead].double()
    return float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())


def _centred(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of logits, or of log-probabilities, less their means: both are then the same."""
    alive = rows >= _DEAD
    mean = torch.where(alive, rows, 0).sum(-1, keepdim=True) / alive.sum(-1, keepdim=True)
    return torch.where(rows < _DEAD, rows, rows - mean)


def _gaps(rows: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    alive = torch.where(rows < _DEAD, float("inf"), rows)
    best, least = rows.amax(-1), alive.amin(-1)
    chosen = rows[torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.long)]
    gaps: list[float] = ((best - chosen) / (best - least)).tolist()
    return gaps


def _row(logprobs: dict[int, float], vocabulary: int) -> torch.Tensor:
    row = torch.full((vocabulary,), float("nan"))
    for token, value in logprobs.items():
        row[token] = value
    return row


def _text_of(tokens: list[int], places: set[int]) -> list[int]:
    """Return the tokens up to the first that is no text, with it."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in places), len(tokens))
    return tokens[:end]


def _places(fields: Any) -> Iterator[int]:
    """Yield the tokens that a config names as something else than text, padding and the places of images among them."""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, dict):
            yield from _places(value)
        elif type(value) is int and _PLACE.fullmatch(name):
            yield value


def _logits(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits of every token of a text, [tokens, vocabulary]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float()


def _worst(values: Sequence[float]) -> float | None:
    """Return the largest value; None where one is no finite number, or there is none."""
    finite = bool(values) and bool(torch.tensor(values).isfinite().all())
    return max(values) if finite else None
