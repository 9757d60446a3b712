"""A run beside transformers on the same weights: every logit within a limit, every token its
choice.

In float32 an error is the worst sequence's rmse(logits - reference) / rmse(reference), and the
limit `SAME`; beyond it the reference in float64 says whose rounding it is
(`onboard.verify.rounding`). In half precision the reference is transformers in float32 on the
rounded weights. Both models err there by rounding, whose size no bound tells beforehand: ours may
err a fifth more than transformers itself does in the run's dtype, over all passages of a kind
together, and by `FLOOR_IN_EPS` of the dtype's spacing besides; where a few rows are most of what
transformers errs by, as choices of experts that rounding decides make them, see
`onboard.verify.rounding.torn_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from onboard.errors import OnboardError
from onboard.modeling import ONE_CODEBOOK, Codebooks
from onboard.runtime.length_dependent_rope import LengthDependentRope
from onboard.verify.error import rmse_ratio
from onboard.verify.held_out import Text, judge, mean_nll
from onboard.verify.hf_logits import Asked, Reference
from onboard.verify.rounding.against_float64 import Rounding, rounding
from onboard.verify.rounding.logits_check import Check
from onboard.verify.rounding.torn_rows import excused, torn_limit
from onboard.verify.tolerances import FLOOR_IN_EPS, MARGIN, READ_OTHERWISE, SAME, TEXT, TIE

Kind = Literal["prompt", "long prompt", "text", "media"]
Logits = list[torch.Tensor]


@dataclass(frozen=True)
class Passage:
    """Tokens that both models read."""

    kind: Kind
    ids: list[int]
    chosen: tuple[int, ...] = ()
    """The tokens chosen greedily after the last `len(chosen)` of `ids`, each given all those before
    it.
    """
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """What a processor made of an image or a sound; then only the rows of the choices are
    compared.
    """

    @property
    def asked(self) -> Asked:
        """The rows that are compared: of a long passage the last ones and some of those before."""
        length = len(self.ids)
        if self.kind == "media":
            return Asked(self.ids, list(range(length - len(self.chosen), length)), self.inputs)
        last = max(0, length - max(len(self.chosen), 256))
        return Asked(
            self.ids, sorted({*range(0, length, max(1, length // 256)), *range(last, length)})
        )


@dataclass(frozen=True)
class Observed:
    """What a run computed: logits of the wanted rows, [rows, vocabulary] float32 on the CPU for
    each passage.
    """

    passages: list[Passage]
    prefill: Logits
    decoded: Logits
    """Of the prompts alone, the last tokens read one by one from the cache, in a batch that prompts
    join in turn.
    """
    codebooks: Codebooks = ONE_CODEBOOK
    """What a token stands for; logits are those of one codebook after the other."""
    again: tuple[torch.Tensor, torch.Tensor] | None = None
    """Log-probabilities of the long prompt's tokens, [tokens, vocabulary], and those of the same
    tokens when it was asked again and its prefix was reused; None: no prefix was."""

    @property
    def finite(self) -> bool:
        """Whether no logit is a NaN or an infinity."""
        return all(
            bool(torch.isfinite(rows).all())
            for rows in (*self.prefill, *self.decoded, *(self.again or ()))
        )


@dataclass(frozen=True)
class Tokens:
    """The greedily chosen tokens beside the float32 reference's choices, given the same tokens
    before.

    Of several codebooks each has its own choices, which are counted one by one.
    """

    compared: int
    ties: int
    """Chosen tokens that are not the reference's, and lie within rounding of it, or in torn rows."""
    differing: int
    allowed: int
    """None in float32; else as often as transformers' own choices in the run's dtype differ, and a
    fifth more.
    """
    largest_gap: float | None
    """By how much a chosen token lies below the best, in standard deviations of its row of
    logits.
    """


@dataclass(frozen=True)
class Comparison:
    """A run beside transformers."""

    checks: list[Check]
    tokens: Tokens
    text: Text
    reference: str
    """How it was computed."""
    notes: list[str] = field(default_factory=list)
    """What the comparison did not reach."""
    beside: str = "transformers"
    """Whose logits and choices the run's are compared with."""

    @property
    def problem(self) -> str | None:
        """What is not transformers', in one sentence."""
        for check in self.checks:
            if not check.passes:
                return check.problem(self.beside)
        if self.tokens.differing > self.tokens.allowed:
            count = f"{self.tokens.differing} of {self.tokens.compared}"
            return f"{count} tokens generated with the cache are not what {self.beside} chooses"
        if self.text.verdict == "different":
            return f"the text is not that of {self.beside}: {self.text.reason}"
        return None

    @property
    def facts(self) -> list[str]:
        """What passed by another rule than the limit."""
        return [fact for check in self.checks if (fact := check.as_rounding(self.beside))]

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the text, for JSON."""
        values = asdict(self)
        del values["text"]
        return {"agrees": self.problem is None, **values}


def passages(
    kind: Kind, prompt: Sequence[int], output: Sequence[int], rope: LengthDependentRope | None
) -> list[Passage]:
    """Return what transformers is to read to check an output; two passages where the rotary table
    changes inside.
    """
    whole, start = [*prompt, *output], len(prompt)
    if rope is None or not start <= rope.switch_length < len(whole) - 1:
        return [Passage(kind, whole[:-1] if output else whole, tuple(output))]
    switch = rope.switch_length
    after = Passage(kind, whole[:-1], tuple(whole[switch + 1 :]))
    return [Passage(kind, whole[:switch], tuple(whole[start : switch + 1])), after]


def compare(
    observed: Observed, reference: Reference, dtype: torch.dtype, notes: list[str]
) -> Comparison:
    """Compare what a run computed with transformers' logits of the same rows; `notes` say what that
    leaves out.
    """
    compared = _compared(observed, reference)
    checks = [_check(what, dtype, selected) for what, selected in compared.items()]
    choices = reference
    if reference.own is None and not all(check.is_within for check in checks):
        choices, missing = _in_float64(reference)
        notes = [*notes, *missing]
    if choices is not reference:
        checks = _with_rounding(checks, compared, _compared(observed, choices))
    tokens = _tokens(observed, choices, checks[1].limit or 0.0)
    text = _text(dtype, _select(observed, reference, "text"), reference.whose)
    checks += _known_prefix(observed, dtype)
    return Comparison(checks, tokens, text, reference.how, notes, reference.whose)


ITSELF = "its own prefill"
"""What a run is compared with that has no reference."""


def compare_with_itself(observed: Observed, dtype: torch.dtype, reason: str) -> Comparison:
    """Compare cached decode with our own prefill, where transformers' logits cannot be had for a
    `reason`.
    """
    prefill = Reference(observed.prefill, None, "none: with its own prefill")
    prompts, ours, *_ = _select(observed, prefill, "prompt")
    sizes = sum(map(len, ours)), max(len(passage.ids) for passage in prompts)
    found = Check(
        "cached decode", *sizes, _number(_worst(observed.decoded, ours)), READ_OTHERWISE[dtype]
    )
    tokens = _tokens(observed, prefill, READ_OTHERWISE[dtype])
    notes = [f"not compared with another implementation: {reason}"]
    return Comparison(
        [found, *_known_prefix(observed, dtype)],
        tokens,
        Text("not judged", reason),
        prefill.how,
        notes,
        ITSELF,
    )


KNOWN_PREFIX = "known prefix"
"""The check of a prompt that is asked again, which a cache that reuses prefixes reads from its
pages.
"""


def _known_prefix(observed: Observed, dtype: torch.dtype) -> list[Check]:
    """Return the check of the long prompt asked again against the first time, whose tokens are
    compared as all are.
    """
    if observed.again is None:
        return []
    first, second = observed.again
    longest = max(
        len(passage.ids) for passage in observed.passages if passage.kind == "long prompt"
    )
    return [
        Check(
            KNOWN_PREFIX,
            len(first),
            longest,
            _number(rmse_ratio(second, first)),
            READ_OTHERWISE[dtype],
        )
    ]


class _Selected(NamedTuple):
    """Passages, with our logits, the reference's and transformers' own in the run's dtype."""

    passages: list[Passage]
    ours: Logits
    exact: Logits
    own: Logits | None


def _compared(observed: Observed, reference: Reference) -> dict[str, _Selected]:
    """Return what is compared with the reference, by its name."""
    prompts, media = (_select(observed, reference, kind) for kind in ("prompt", "media"))
    found = {"prefill": prompts, "cached decode": prompts._replace(ours=observed.decoded)}
    for kind in ("long prompt", "text"):
        if (selected := _select(observed, reference, kind)).passages:
            found[kind] = selected
    if media.passages:
        exact, own = (logits and _log_softmax(logits) for logits in (media.exact, media.own))
        found["with an image or a sound"] = media._replace(exact=exact or [], own=own)
    return found


def _in_float64(reference: Reference) -> tuple[Reference, list[str]]:
    """Return the reference in float64, which tells whose rounding errors beyond the limit are, and
    whose choices the tokens ought to be; where it cannot be had the same one, and why not.
    """
    if reference.in_float64 is None:
        return reference, []
    try:
        return replace(reference, exact=reference.in_float64()), []
    except OnboardError as error:
        return reference, [f"it is not known whose rounding an error is: {error.message}"]


def _with_rounding(
    checks: list[Check], theirs: dict[str, _Selected], exact: dict[str, _Selected]
) -> list[Check]:
    """Return checks that say of errors beyond the limit whose rounding they are."""
    return [
        check
        if check.is_within
        else replace(check, rounding=_rounding(theirs[check.what], exact[check.what]))
        for check in checks
    ]


def _rounding(theirs: _Selected, exact: _Selected) -> Rounding | None:
    return rounding(theirs.ours, theirs.exact, exact.exact)


def _select(observed: Observed, reference: Reference, kind: str) -> _Selected:
    """Return the passages of a kind, with our logits, the reference's and transformers' own in the
    run's dtype.
    """
    chosen = [number for number, passage in enumerate(observed.passages) if passage.kind == kind]
    ours, exact, own = observed.prefill, reference.exact, reference.own
    return _Selected(
        [observed.passages[number] for number in chosen],
        [ours[number] for number in chosen],
        [exact[number] for number in chosen],
        [own[number] for number in chosen] if own else None,
    )


def _log_softmax(logits: Logits) -> Logits:
    """Return log-probabilities, which is what an engine's outputs have."""
    return [rows.log_softmax(dim=-1) for rows in logits]


def _check(what: str, dtype: torch.dtype, selected: _Selected) -> Check:
    passages, ours, exact, own = selected
    sizes = sum(map(len, exact)), max(len(passage.ids) for passage in passages)
    zeros = not all(bool(rows.any()) for rows in exact)
    if own is None:
        return Check(what, *sizes, _number(_worst(ours, exact)), SAME, zeros=zeros)
    theirs = rmse_ratio(torch.cat(own), torch.cat(exact))
    floor = FLOOR_IN_EPS * torch.finfo(dtype).eps
    error, limit, torn = rmse_ratio(torch.cat(ours), torch.cat(exact)), MARGIN * theirs + floor, 0
    if error > limit and (found := torn_limit(ours, own, exact, floor)) is not None:
        limit, torn = found
    numbers = (_number(error), _number(limit), _number(theirs))
    return Check(what, *sizes, *numbers, zeros=zeros, torn=torn)


def _worst(ours: Logits, exact: Logits) -> float:
    """Return the largest error over passages, NaN if any is (which Python's `max` hides behind a
    number).
    """
    errors = [rmse_ratio(*pair) for pair in zip(ours, exact, strict=True)]
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _tokens(observed: Observed, reference: Reference, limit: float) -> Tokens:
    passages, codebooks = observed.passages, observed.codebooks
    exact = _rows_of_choices(passages, reference.exact, codebooks)
    tokens = torch.tensor(
        [token for passage in passages for token in passage.chosen], dtype=torch.long
    )
    chosen = codebooks.unpack(tokens).flatten()
    gaps = _gaps(exact, chosen)
    far = ~(gaps <= TIE * limit)
    allowed = 0
    if reference.own is not None:
        own = _rows_of_choices(passages, reference.own, codebooks)
        ways = (observed.prefill, _as_decoded(observed))
        ours = [_rows_of_choices(passages, rows, codebooks) for rows in ways]
        far &= ~excused(far, ours, own, exact)
        of_own = _gaps(exact, own.argmax(dim=-1))
        allowed = math.ceil(MARGIN * int((~(of_own <= TIE * limit)).sum()))
    ties = int(((gaps > 0) & ~far).sum())
    return Tokens(len(chosen), ties, int(far.sum()), allowed, _number(float(gaps.max())))


def _as_decoded(observed: Observed) -> Logits:
    """Return the logits of each passage, those read from the cache where there are such."""
    decoded = iter(observed.decoded)
    pairs = zip(observed.passages, observed.prefill, strict=True)
    return [next(decoded, rows) if passage.kind == "prompt" else rows for passage, rows in pairs]


def _rows_of_choices(
    passages: Sequence[Passage], logits: Logits, codebooks: Codebooks
) -> torch.Tensor:
    """Return the rows in which the chosen tokens were chosen, the last ones of each passage: one
    for each codebook.
    """
    pairs = zip(passages, logits, strict=True)
    rows = torch.cat([rows[len(rows) - len(passage.chosen) :] for passage, rows in pairs])
    return codebooks.split(rows).flatten(0, 1)


def _gaps(rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return by how many deviations of its row each chosen token lies below the best."""
    picked = rows.gather(-1, chosen[:, None])[:, 0]
    return (rows.amax(dim=-1) - picked) / rows.std(dim=-1).clamp_min(torch.finfo(rows.dtype).tiny)


def _text(dtype: torch.dtype, selected: _Selected, beside: str) -> Text:
    passages, ours, exact, own = selected
    if not passages:
        return Text("not judged", "the checkpoint has no tokenizer, so there is no text")
    ids = [passage.ids for passage in passages]
    expected = mean_nll(exact, ids)
    allowed = TEXT[dtype] + (MARGIN * abs(mean_nll(own, ids) - expected) if own else 0.0)
    return judge(mean_nll(ours, ids), expected, allowed=allowed, beside=beside)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
