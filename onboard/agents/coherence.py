"""Is what a model generates language? Measures of text and of weights, and the judgement that follows from them.

A model whose weights are still random cannot write English however right its implementation is, so it is not judged;
that the weights are random is measured on the weights themselves and not concluded from the bad text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Literal

import torch

Verdict = Literal["coherent", "incoherent", "not judged"]
Reference = Callable[[], float | None]
"""Computes the held-out loss of Hugging Face's own model; None when it cannot be had."""

MAX_NLL_SHARE = 0.8
"""Bound on the held-out loss as a share of the uniform distribution's, log(vocabulary). English word frequencies alone
give about 0.85 of it, a working small language model 0.3 to 0.6, a broken one 1 and more."""
MAX_REPETITION = 0.9
"""Bound on the share of repeated trigrams: beyond it a text is one phrase over and over."""
MIN_TRAINED_EXCESS = 2.0
"""Bound on `spectral_excess`: random matrices stay below 1, fifty steps of training lift the median to 5."""
SAME_NLL = 0.02
"""Relative difference of two held-out losses that counts as none (bfloat16 rounding moves it by less)."""

HELD_OUT = """\
The old man walked down to the river every morning before the sun came up. He carried a small basket and a long stick, \
and his brown dog ran ahead of him along the path. When they came to the water, he sat on a flat stone and waited. He \
did not mind the cold. "The fish will come," he said to the dog, "if we are quiet." Most days they went home with \
nothing, but he was never sad about it. One day a little girl from the village came and sat down beside him. She asked \
him why he came here if he never caught any fish. He thought about it for a long time. Then he smiled and said that \
the river had more to give than fish, and that she would know what he meant when she was older."""
"""Plain English, for checkpoints that bring no `heldout.txt` of their own."""
HELD_OUT_FILE = "heldout.txt"
"""Held-out text beside a checkpoint, of the kind that the model was trained on."""

_BLOCK = 512
_MAX_MATRICES = 24


@dataclass(frozen=True)
class Coherence:
    """The judgement on a run's texts."""

    verdict: Verdict
    reason: str
    perplexity: float | None
    """exp of the mean loss a token on `HELD_OUT`; None without a tokenizer."""
    vocabulary: int
    repetition: float
    """Median over the outputs, 0 to 1."""
    spectral_excess: float | None
    """Median of `spectral_excess` over the weight matrices; None when no checkpoint was loaded."""


def mean_nll(logits: torch.Tensor, token_ids: Sequence[int]) -> float:
    """Return the mean loss in nats of `token_ids[1:]` under `logits` [tokens, vocabulary]."""
    targets = torch.tensor(token_ids[1:], device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[:-1].float(), targets))


def repetition(token_ids: Sequence[int]) -> float:
    """Return the share of trigrams that already occurred earlier, 0 (none) to 1; 0 for fewer than three tokens."""
    trigrams = list(zip(token_ids, token_ids[1:], token_ids[2:], strict=False))
    return 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0


def spectral_excess(matrix: torch.Tensor) -> float:
    """Return by how much the largest singular value of [m, n] exceeds that of a random matrix, in its fluctuations.

    Independent entries with zero mean and variance s^2 have a largest singular value near s (sqrt(m) + sqrt(n)) (Bai
    and Yin 1993), with fluctuations of relative size min(m, n)^(-2/3) (Tracy and Widom 1996). So random matrices stay
    below about 1, and what training writes into a matrix, correlated directions, lifts it far above.
    """
    matrix = matrix.float()
    m, n = matrix.shape
    scale = float(matrix.square().mean().sqrt())
    if scale == 0:
        return 0.0
    gram = matrix @ matrix.T if m <= n else matrix.T @ matrix
    largest = math.sqrt(max(float(torch.linalg.eigvalsh(gram / scale**2)[-1]), 0.0))
    return (largest / (math.sqrt(m) + math.sqrt(n)) - 1) * math.pow(min(m, n), 2 / 3)


def weights_excess(folder: Path) -> float | None:
    """Return the median `spectral_excess` over blocks of a checkpoint's matrices; None when it has no matrix."""
    values = [spectral_excess(matrix) for matrix in islice(_matrices(folder), _MAX_MATRICES)]
    return median(values) if values else None


def judge(
    outputs: Sequence[Sequence[int]],
    *,
    held_out_nll: float | None,
    vocabulary: int,
    excess: float | None,
    reference: Reference = lambda: None,
) -> Coherence:
    """Judge generated tokens.

    `excess` None means that the weights are random by the run's own configuration. `reference` is asked only when the
    text is bad and the weights are not random: when Hugging Face's model is as bad, the weights are to blame.
    """
    repeated = median(map(repetition, outputs))
    verdict, reason = _verdict(_problem(outputs, repeated, held_out_nll, vocabulary), held_out_nll, excess, reference)
    if held_out_nll is None:
        return Coherence(verdict, reason, None, vocabulary, repeated, excess)
    perplexity = math.exp(min(held_out_nll, 700.0)) if math.isfinite(held_out_nll) else None
    measured = f"held-out perplexity {perplexity or math.inf:.4g} with a vocabulary of {vocabulary}"
    return Coherence(
        verdict, f"{reason} ({measured})" if reason else measured, perplexity, vocabulary, repeated, excess
    )


def _verdict(problem: str, nll: float | None, excess: float | None, reference: Reference) -> tuple[Verdict, str]:
    if nll is None:
        return "not judged", "the checkpoint has no tokenizer, so there is no text"
    if not problem:
        return "coherent", ""
    if excess is None or excess < MIN_TRAINED_EXCESS:
        return "not judged", "weights look random"
    expected = reference()
    if expected is not None and abs(nll - expected) < SAME_NLL * expected:
        return "not judged", f"{problem}, and so it is with the Hugging Face model: the weights, not the implementation"
    return "incoherent", problem


def _problem(outputs: Sequence[Sequence[int]], repeated: float, nll: float | None, vocabulary: int) -> str:
    if 2 * sum(not output for output in outputs) > len(outputs):
        return "most outputs are empty"
    if repeated > MAX_REPETITION:
        return f"the outputs repeat themselves ({repeated:.0%} of the trigrams)"
    if nll is not None and not nll < MAX_NLL_SHARE * math.log(vocabulary):
        return "held-out English is hardly likelier than chance"
    return ""


def _matrices(folder: Path) -> Iterator[torch.Tensor]:
    """Yield a corner of each floating-point matrix of a checkpoint, at most 512 x 512."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                if (
                    len(shape := part.get_shape()) == 2
                    and min(shape) >= 8
                    and part.get_dtype() in ("F32", "F16", "BF16")
                ):
                    yield part[:_BLOCK, :_BLOCK]
