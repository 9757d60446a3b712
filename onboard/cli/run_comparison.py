"""`onboard run --benchmark` and `--enable-pytorch-run`: times, and transformers' own answers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onboard.errors import UsageError

if TYPE_CHECKING:
    from onboard.bench.prompts.prompt_times import PromptTimes
    from onboard.runtime.calls.outputs import RequestOutput
    from onboard.runtime.llm import LLM
    from onboard.runtime.sampling_params import SamplingParams
    from onboard.runtime.static.static_llm import StaticLLM


@dataclass(frozen=True)
class Comparison:
    """What is wanted besides the answers."""

    benchmark: bool
    transformers: bool

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to do."""
        return self.benchmark or self.transformers

    def check(self, params: SamplingParams) -> None:
        """Raise `UsageError` where answers cannot be compared with greedy ones."""
        other = params.n > 1 or params.adjusts_logits or params.lora is not None
        if self.transformers and (not params.greedy or other):
            raise UsageError(
                "--enable-pytorch-run compares greedy tokens, and something else was asked for",
                hint="Leave --temperature and -n out",
            )


@dataclass
class Compared:
    """What came of it; the keys of the document."""

    benchmark: dict[str, dict[str, float]] = field(default_factory=dict)
    pytorch: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return what a person is told."""
        found = [
            f"{name}: prefill {1e3 * each['prefill']:.1f} ms, "
            f"{1e3 * each['decode_step']:.2f} ms a token, {each['tokens_per_second']:.1f} tokens/s"
            for name, each in self.benchmark.items()
        ]
        if self.pytorch:
            same, count = sum(self.pytorch["same"]), len(self.pytorch["same"])
            found.append(f"transformers gives the same tokens for {same} of {count} prompts")
        return found


def compare(
    wanted: Comparison,
    llm: LLM | StaticLLM,
    outputs: list[RequestOutput],
    params: SamplingParams,
    **where: Any,
) -> Compared:
    """Time the prompts of `outputs`, and let transformers answer them, as is wanted.

    `where` has the model and its settings, for transformers.
    """
    found = Compared()
    prompts = [output.prompt_token_ids for output in outputs]
    if wanted.benchmark:
        times = _own_times(llm, prompts, params, _longest(outputs))
        found.benchmark["onboard"] = times.as_dict()
    if wanted.transformers:
        _ask_transformers(found, wanted.benchmark, llm, outputs, params, **where)
    return found


def _own_times(
    llm: LLM | StaticLLM, prompts: list[list[int]], params: SamplingParams, count: int
) -> PromptTimes:
    from onboard.bench.prompts.prompt_times import time_prompts

    def generate(output: int) -> object:
        endless = {"max_tokens": output, "ignore_eos": True, "stop": [], "stop_token_ids": []}
        return llm.generate(prompts, params.model_copy(update=endless))

    return time_prompts(generate, len(prompts), count, llm.device)


def _ask_transformers(
    found: Compared,
    timed: bool,
    llm: LLM | StaticLLM,
    outputs: list[RequestOutput],
    params: SamplingParams,
    **where: Any,
) -> None:
    from onboard.bench.prompts.prompt_times import run_transformers

    print("running transformers' own model", file=sys.stderr)
    done = run_transformers(
        prompts=[output.prompt_token_ids for output in outputs],
        output=_longest(outputs),
        device=llm.device,
        ignore_eos=params.ignore_eos,
        timed=timed,
        **where,
    )
    same = [
        ours.token_ids == theirs[: len(ours.token_ids)]
        for ours, theirs in zip(outputs, done.tokens, strict=True)
    ]
    found.pytorch = {"token_ids": done.tokens, "same": same}
    if done.times is not None:
        found.benchmark["transformers"] = done.times.as_dict()


def _longest(outputs: list[RequestOutput]) -> int:
    return max(len(output.token_ids) for output in outputs)
