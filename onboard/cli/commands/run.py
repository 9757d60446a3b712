"""`onboard run`: generate text with an onboarded model."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onboard.cli import options
from onboard.cli.batch_answers import answer_batch
from onboard.cli.model_argument import check_config, registered_names
from onboard.cli.options import Device, DTypeName, ModeName
from onboard.cli.result import Result
from onboard.cli.setting_options import settings_of
from onboard.cli.talk_with_person import converse
from onboard.cli.terminal import one_line, progress, shown
from onboard.errors import UsageError
from onboard.sources.hub_errors import go_offline

if TYPE_CHECKING:
    from onboard.runtime.calls.outputs import RequestOutput
    from onboard.runtime.calls.prompt_forms import Prompt
    from onboard.runtime.llm import LLM
    from onboard.runtime.sampling_params import SamplingParams


MOST_TOKENS = 64
_Prompts = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROMPT", help="Prompts, as text.", show_default="read stdin"),
]
_TokenIds = Annotated[
    list[str] | None,
    typer.Option(metavar="ID,ID,...", help="A prompt as token ids; repeatable."),
]
_Chat = Annotated[
    bool, typer.Option("--chat", help="Hold a conversation; each line of stdin is a message.")
]
_System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="The system's message of conversations.")
]
_Input = Annotated[
    Path | None,
    typer.Option("--input", help="File of requests, one a line (JSON), answered to --output."),
]
_Output = Annotated[
    Path | None, typer.Option(help="File of their answers; those that it has are not repeated.")
]
_MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum tokens to generate for each prompt.",
        show_default=f"{MOST_TOKENS}; with --chat until the end",
    ),
]
_Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")]
_TopP = Annotated[
    float, typer.Option(help="Sample from the most likely tokens with this total probability.")
]
_TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: all.")]
_MinP = Annotated[
    float, typer.Option(help="Minimum probability of a token, relative to the most likely one.")
]
_Seed = Annotated[int | None, typer.Option(help="Seed of sampling.")]
_Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop text that ends the output; repeatable."),
]
_IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Do not stop at the end-of-text token.")
]
_N = Annotated[int, typer.Option("-n", help="Number of outputs for each prompt.")]
_StopTokenIds = Annotated[
    str | None, typer.Option(metavar="ID,ID,...", help="Stop tokens that end the output.")
]
_Logprobs = Annotated[
    int | None, typer.Option(help="Log-probabilities to report for each token (with --json).")
]
_BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Make logits independent of the rest of the batch, bit for bit; slower.",
    ),
]
_Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Fail at a fallback, or if the model changed since it was tested and run.",
    ),
]


def run(
    model: options.Model,
    prompts: _Prompts = None,
    root: options.Root = Path(),
    config: options.Config = None,
    device: options.OnDevice = Device.AUTO,
    dtype: options.InDType = DTypeName.AUTO,
    mode: options.Mode = ModeName.GRAPH,
    token_ids: _TokenIds = None,
    chat: _Chat = False,
    system: _System = None,
    input_: _Input = None,
    output: _Output = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    top_k: _TopK = 0,
    min_p: _MinP = 0.0,
    seed: _Seed = None,
    stop: _Stop = None,
    ignore_eos: _IgnoreEos = False,
    n: _N = 1,
    stop_token_ids: _StopTokenIds = None,
    logprobs: _Logprobs = None,
    max_seq_len: options.MaxSeqLen = None,
    max_batch_size: options.MaxBatchSize = None,
    kv_cache_dtype: options.KVCacheDType = None,
    attn_backend: options.AttnBackend = None,
    compile_backend: options.AnyCompileBackend = None,
    revision: options.Revision = None,
    set_: options.Set = None,
    batch_invariant: _BatchInvariant = False,
    strict: _Strict = False,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> Result | int | None:
    """Generate text with an onboarded model.

    All prompts run in one batch. Decoding is greedy unless a temperature is set.
    """
    if offline:
        go_offline()
    most = max_tokens if max_tokens is not None or chat else MOST_TOKENS
    chosen: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    chosen |= {"min_p": min_p, "max_tokens": most, "stop": stop or [], "ignore_eos": ignore_eos}
    chosen |= {"stop_token_ids": _parse_ids("stop-token-ids", stop_token_ids), "seed": seed, "n": n}
    wanted = _Wanted(prompts or [], token_ids or [], chat, system, input_, output, as_json)
    params = wanted.checked(chosen | {"logprobs": logprobs})
    sizes: dict[str, Any] = {"max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
    sizes |= {"attn_backend": attn_backend, "compile_backend": compile_backend}
    sizes |= {"revision": revision, "kv_cache_config__dtype": kv_cache_dtype}
    settings = settings_of(set_, **sizes)
    where: dict[str, Any] = {"device": device.value, "dtype": dtype.value, "mode": mode.value}
    where["batch_invariant"] = batch_invariant
    with registered_names(model, root):
        check_config(model, root, config, where, settings)
        llm = _load(model, root=root, config=config, strict=strict, settings=settings, **where)
    return wanted.answered(model, llm, params, chosen)


@dataclass(frozen=True)
class _Wanted:
    """What is to be generated: a conversation, answers to a file, or texts that go on."""

    prompts: list[str]
    token_ids: list[str]
    chat: bool
    system: str | None
    input: Path | None
    output: Path | None
    as_json: bool

    def checked(self, chosen: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters; raise `UsageError` for what does not go together."""
        if self.chat and (self.token_ids or self.input or self.as_json or chosen["n"] > 1):
            raise UsageError("--chat goes with neither --token-ids, --input, --json nor -n")
        if (self.input is None) != (self.output is None):
            raise UsageError("--input and --output go together", hint="Give both files")
        if self.input is not None and (self.prompts or self.token_ids or self.as_json):
            raise UsageError("--input goes with neither prompts nor --json")
        if self.input is not None and not self.input.is_file():
            raise UsageError(f"{self.input} is no file")
        if self.system is not None and not (self.chat or self.input):
            raise UsageError("--system is for conversations", hint="Add --chat, or --input")
        if not self.chat and self.input is None:
            self.texts  # noqa: B018 (what is wrong with them is said before a model is loaded)
        return _sampling_params(**chosen)

    @cached_property
    def texts(self) -> list[Prompt]:
        """The prompts, from standard input if there are no others."""
        return _prompts(self.prompts, self.token_ids)

    def answered(
        self, model: str, llm: LLM, params: SamplingParams, chosen: Mapping[str, Any]
    ) -> Result | int | None:
        """Generate it."""
        if self.chat:
            _converse(llm, params, self.system, self.prompts)
            return None
        if self.input is not None and self.output is not None:
            return answer_batch(model, llm, self.input, self.output, chosen, self.system)
        outputs = _generate(llm, self.texts, params)
        _print_facts(llm)
        if self.as_json:
            return Result(_document(model, llm, outputs))
        _print_outputs(outputs)
        return None


def _converse(llm: LLM, params: SamplingParams, system: str | None, first: list[str]) -> None:
    from onboard.serve.answers.talking import Talk

    talk = Talk(llm, params, system)
    _print_facts(llm)
    converse(talk, first)
    _print_speed(llm)


def _print_facts(llm: LLM) -> None:
    for fact in llm.engine.facts:
        print(f"note: {one_line(fact)}", file=sys.stderr)


def _print_speed(llm: LLM) -> None:
    stats = llm.engine.stats
    speed = f"{stats.tokens_per_second:.1f} tokens/s"
    print(f"{stats.generated_tokens} tokens in {stats.seconds:.1f} s ({speed})", file=sys.stderr)
    print(stats.cache_line(), file=sys.stderr)


def _prompts(texts: list[str], token_ids: list[str]) -> list[Prompt]:
    prompts: list[Prompt] = [*texts, *(_parse_ids("token-ids", ids) for ids in token_ids)]
    if not prompts and not sys.stdin.isatty() and (text := sys.stdin.read().strip("\n")):
        prompts = [text]
    if not prompts:
        raise UsageError(
            "there is no prompt", hint='Give one: onboard run MODEL "Once upon a time"'
        )
    return prompts


def _parse_ids(option: str, text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UsageError(
            f"--{option} {text!r} is not a list of numbers", hint="Write it as 1,2,3"
        ) from None


def _sampling_params(**values: Any) -> SamplingParams:
    from onboard.runtime.sampling_params import SamplingParams

    try:
        return SamplingParams(**values)
    except UsageError as error:  # "max_tokens is 0: ..."
        name, _, found = error.message.partition(" is ")
        raise UsageError(f"--{name.replace('_', '-')} {found}") from None


def _load(model: str, **settings: Any) -> LLM:
    start = time.perf_counter()
    with progress(f"loading {model}", None):
        from onboard.runtime.llm import LLM

        llm = LLM(model, **settings)
    seconds = time.perf_counter() - start
    print(
        f"loaded {model} on {llm.engine.cache.info.device.type} in {seconds:.1f} s", file=sys.stderr
    )
    return llm


def _generate(llm: LLM, prompts: list[Prompt], params: SamplingParams) -> list[RequestOutput]:
    stats = llm.engine.stats
    most = None if params.max_tokens is None else len(prompts) * params.n * params.max_tokens
    with progress("generating", most) as advance:
        outputs = llm.generate(prompts, params, on_step=lambda _: advance(stats.generated_tokens))
    _print_speed(llm)
    return outputs


def _document(model: str, llm: LLM, outputs: list[RequestOutput]) -> dict[str, Any]:
    return {
        "model": model,
        "outputs": [asdict(output) for output in outputs],
        "limits": llm.engine.limits,
        "stats": llm.engine.stats.as_dict(),
        "facts": llm.engine.facts,
    }


def _print_outputs(outputs: list[RequestOutput]) -> None:
    """Print the texts alone; with several prompts each under its prompt. Without a tokenizer: the
    token ids.
    """
    for output in outputs:
        if len(outputs) > 1:
            print(
                f"> {shown(output.prompt) if output.prompt is not None else _ids(output.prompt_token_ids)}"
            )
        for completion in output.outputs:
            print(shown(completion.text) or _ids(completion.token_ids))
        if len(outputs) > 1:
            print()


def _ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))
