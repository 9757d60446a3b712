"""`onboard run --benchmark` and `--enable-pytorch-run`: times, and transformers' own answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onboard.errors import UsageError

if TYPE_CHECKING:
    from onboard.bench.prompts.prompt_times import PromptTimes
    from onboard.runtime.calls.outputs import RequestOutput
    from onboard.runtime.calls.prompt_forms import Prompt
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

    def fitted(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a configuration and its settings; what is timed reuses no prefixes of earlier
        runs, unless the settings say so.
        """
        from onboard.config import deep_merge

        if not self.benchmark:
            return given
        timed: dict[str, Any] = {"kv_cache_config": {"enable_block_reuse": False}}
        return {**given, "settings": deep_merge(timed, dict(given["settings"]))}

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
    asked: list[Prompt],
    outputs: list[RequestOutput],
    params: SamplingParams,
    **where: Any,
) -> Compared:
    """Time the prompts `asked`, and let transformers answer them, as is wanted.

    `where` has the model and its settings, for transformers. Both sides get what the processor has
    made of images and sounds.
    """
    found = Compared()
    if not wanted.is_wanted:
        return found
    prompts = [_processed(llm, *each) for each in zip(asked, outputs, strict=True)]
    if wanted.benchmark:
        times = _own_times(llm, prompts, params, _longest(outputs))
        found.benchmark["onboard"] = times.as_dict()
    if wanted.transformers:
        _ask_transformers(found, wanted.benchmark, llm, prompts, outputs, params, **where)
    return found


def _processed(llm: LLM | StaticLLM, prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    """Return a prompt's token ids, and the inputs of its images and sounds."""
    from onboard.runtime.calls.prompt_forms import has_media

    inputs = None
    if has_media(prompt):
        reader: Any = llm.prompts  # type: ignore[union-attr]  # static caches take text alone
        inputs = reader.read(prompt, reader.media(prompt)).inputs
    return {"prompt_token_ids": output.prompt_token_ids, "processed": inputs}


def _own_times(
    llm: LLM | StaticLLM, prompts: list[dict[str, Any]], params: SamplingParams, count: int
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
    prompts: list[dict[str, Any]],
    outputs: list[RequestOutput],
    params: SamplingParams,
    **where: Any,
) -> None:
    from onboard.bench.prompts.prompt_times import run_transformers
    from onboard.runtime.multimodal.own_towers import is_read_by_own_code

    if any(is_read_by_own_code(each["processed"]) for each in prompts):
        raise UsageError(
            "--enable-pytorch-run compares with transformers, which has no towers of this model",
            hint="Leave it out, or the images",
        )
    print("running transformers' own model", file=sys.stderr)
    done = run_transformers(
        prompts=[each["prompt_token_ids"] for each in prompts],
        inputs=[each["processed"] for each in prompts],
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
