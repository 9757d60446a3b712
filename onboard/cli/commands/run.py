"""`onboard run`: generate text with an onboarded model."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from onboard.cli import options
from onboard.cli.batch_answers import answer_batch
from onboard.cli.model_argument import check_config, registered_names, say_division
from onboard.cli.options import CacheForm, Device, DTypeName, ModeName, Precision
from onboard.cli.prompting import sampling_options
from onboard.cli.prompting.adapter_options import Lora, adapters_of, one_adapter
from onboard.cli.prompting.media_options import (
    Audio,
    GivenMedia,
    Image,
    TrustRemoteCode,
    Unsandboxed,
)
from onboard.cli.prompting.talk_with_person import converse
from onboard.cli.result import Result
from onboard.cli.run_comparison import Compared, Comparison, compare
from onboard.cli.setting_options import settings_of
from onboard.cli.terminal import one_line, progress, shown
from onboard.errors import UsageError

if TYPE_CHECKING:
    from onboard.runtime.calls.outputs import RequestOutput
    from onboard.runtime.calls.prompt_forms import Prompt
    from onboard.runtime.llm import LLM
    from onboard.runtime.sampling_params import SamplingParams
    from onboard.runtime.static.static_llm import StaticLLM


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
        "--max-tokens",
        "--num-tokens",
        help="Maximum tokens to generate for each prompt.",
        show_default=f"{MOST_TOKENS}; with --chat until the end",
    ),
]
_Precision = Annotated[
    Precision | None,
    typer.Option(case_sensitive=False, help="The same as --dtype.", show_default="by --dtype"),
]
_Cache = Annotated[
    CacheForm,
    typer.Option(
        help="How keys and values are kept: in pages, or as inputs and outputs of the graph."
    ),
]
_Tokenizer = Annotated[
    str | None,
    typer.Option(help="Folder or id of another tokenizer.", show_default="the checkpoint's"),
]
_Benchmark = Annotated[
    bool, typer.Option("--benchmark", help="Time the prompts, with outputs of the same length.")
]
_PyTorch = Annotated[
    bool,
    typer.Option(
        "--enable-pytorch-run", help="Let transformers' own model answer, too, and compare."
    ),
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
    lora: Lora = None,
    image: Image = None,
    audio: Audio = None,
    max_tokens: _MaxTokens = None,
    temperature: sampling_options.Temperature = 0.0,
    top_p: sampling_options.TopP = 1.0,
    top_k: sampling_options.TopK = 0,
    min_p: sampling_options.MinP = 0.0,
    seed: sampling_options.Seed = None,
    stop: sampling_options.Stop = None,
    ignore_eos: sampling_options.IgnoreEos = False,
    n: sampling_options.N = 1,
    stop_token_ids: sampling_options.StopTokenIds = None,
    logprobs: sampling_options.Logprobs = None,
    world_size: options.WorldSize = None,
    max_seq_len: options.MaxSeqLen = None,
    max_batch_size: options.MaxBatchSize = None,
    kv_cache_dtype: options.KVCacheDType = None,
    attn_backend: options.AttnBackend = None,
    compile_backend: options.AnyCompileBackend = None,
    draft: options.Draft = None,
    revision: options.Revision = None,
    set_: options.Set = None,
    precision: _Precision = None,
    tokenizer: _Tokenizer = None,
    cache: _Cache = CacheForm.PAGED,
    benchmark: _Benchmark = False,
    enable_pytorch_run: _PyTorch = False,
    batch_invariant: _BatchInvariant = False,
    strict: _Strict = False,
    trust_remote_code: TrustRemoteCode = False,
    unsandboxed: Unsandboxed = False,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> Result | int | None:
    """Generate text with an onboarded model, greedily by default."""
    chosen: Any = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    chosen |= {"seed": seed, "n": n, **_ends(ignore_eos, max_tokens, chat, stop, stop_token_ids)}
    way = cache, Comparison(benchmark, enable_pytorch_run), as_json, image or [], audio or []
    wanted = _Wanted(prompts or [], token_ids or [], chat, system, input_, output, *way)
    sizes = _sizes(max_seq_len, max_batch_size, kv_cache_dtype, attn_backend, compile_backend)
    sizes |= {"revision": revision, **_beside(tokenizer, lora, draft)}
    given = {"settings": settings_of(set_, world_size=world_size, **sizes), "config": config}
    how = {"device": device.value, "dtype": _dtype(dtype, precision).value, "mode": mode.value}
    told = _Told(model, root, given, how, strict, batch_invariant, trust_remote_code, unsandboxed)
    return wanted.answered(told, chosen, {"logprobs": logprobs, "lora": one_adapter(lora, input_)})


def _sizes(
    max_seq_len: int | None,
    max_batch_size: int | None,
    kv_cache_dtype: Any,
    attn_backend: Any,
    compile_backend: Any,
) -> dict[str, Any]:
    """Return the settings of limits and back ends."""
    found = {"max_seq_len": max_seq_len, "max_batch_size": max_batch_size}
    found |= {"attn_backend": attn_backend, "compile_backend": compile_backend}
    return {**found, "kv_cache_config__dtype": kv_cache_dtype}


def _beside(tokenizer: str | None, lora: list[str] | None, draft: str | None) -> dict[str, Any]:
    """Return the settings of what works beside the checkpoint."""
    return {"tokenizer": tokenizer, "lora": adapters_of(lora), "speculative__draft": draft}


def _ends(
    ignore_eos: bool,
    max_tokens: int | None,
    chat: bool,
    stop: list[str] | None,
    stop_token_ids: str | None,
) -> dict[str, Any]:
    """Return the parameters that say when an output ends."""
    most = max_tokens if max_tokens is not None or chat else MOST_TOKENS
    ids = _parse_ids("stop-token-ids", stop_token_ids)
    return {"ignore_eos": ignore_eos, "max_tokens": most, "stop": stop or [], "stop_token_ids": ids}


@dataclass(frozen=True)
class _Told:
    """What is said of the model and of how it runs."""

    model: str
    root: Path
    given: Mapping[str, Any]
    """Its configuration, and settings that replace parts of it."""
    where: Mapping[str, Any]
    """Device, dtype and mode."""
    strict: bool
    batch_invariant: bool
    trust_remote_code: bool
    unsandboxed: bool


def _dtype(dtype: DTypeName, precision: Precision | None) -> DTypeName:
    if precision is None:
        return dtype
    if dtype not in (DTypeName.AUTO, precision.dtype):
        raise UsageError(
            f"--dtype is {dtype.value} and --precision {precision.value}", hint="Give one of them"
        )
    return precision.dtype


@dataclass(frozen=True)
class _Wanted:
    """What is to be generated: a conversation, answers to a file, or texts that go on."""

    prompts: list[str]
    token_ids: list[str]
    chat: bool
    system: str | None
    input: Path | None
    output: Path | None
    cache: CacheForm
    comparison: Comparison
    as_json: bool
    images: list[str]
    sounds: list[str]

    @property
    def media(self) -> GivenMedia:
        """What each prompt is about."""
        return GivenMedia(self.images, self.sounds)

    def checked(self, chosen: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters; raise `UsageError` for what does not go together."""
        cached = self.cache is not CacheForm.PAGED
        self.media.check(**{"input": self.input, "token-ids": self.token_ids, "cache": cached})
        if self.chat and (self.token_ids or self.input or self.as_json or chosen["n"] > 1):
            raise UsageError("--chat goes with neither --token-ids, --input, --json nor -n")
        is_special = self.chat or self.input is not None
        if is_special and (cached or self.comparison.is_wanted):
            raise UsageError(
                "--chat and --input go with neither --cache, --benchmark nor --enable-pytorch-run"
            )
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
        params = _sampling_params(**chosen)
        self.comparison.check(params)
        return params

    @cached_property
    def texts(self) -> list[Prompt]:
        """The prompts, from standard input if there are no others."""
        return _prompts(self.prompts, self.token_ids)

    def answered(
        self,
        told: _Told,
        chosen: Mapping[str, Any],
        further: Mapping[str, Any],
    ) -> Result | int | None:
        """Load the model and generate it, with `chosen` and, of prompts, `further` parameters."""
        params = self.checked({**chosen, **further})
        told = replace(told, given=self.comparison.fitted(told.given))
        llm = _load(told, self.cache, self.media)
        if self.chat:
            _converse(cast("LLM", llm), params, self.system, self.prompts, self.media)
            return None
        if self.input is not None and self.output is not None:
            return answer_batch(
                told.model, cast("LLM", llm), self.input, self.output, chosen, self.system
            )
        prompts = self.media.asked(llm, self.texts)
        outputs = _generate(llm, prompts, params)
        where = {"model": told.model, "root": told.root, "overrides": told.where, **told.given}
        compared = compare(self.comparison, llm, prompts, outputs, params, **where)
        _print_facts(llm)
        if self.as_json:
            return Result(_document(told.model, llm, outputs, compared))
        _print_outputs(outputs)
        for line in compared.lines():
            print(line, file=sys.stderr)
        return None


def _converse(
    llm: LLM, params: SamplingParams, system: str | None, first: list[str], media: GivenMedia
) -> None:
    from onboard.serve.answers.talking import Talk

    talk = Talk(llm, params, system, media.parts)
    _print_facts(llm)
    converse(talk, first)
    _print_speed(llm)


def _print_facts(llm: LLM | StaticLLM) -> None:
    for fact in llm.facts:
        print(f"note: {one_line(fact)}", file=sys.stderr)


def _print_speed(llm: LLM | StaticLLM) -> None:
    stats = llm.stats
    speed = f"{stats.tokens_per_second:.1f} tokens/s"
    print(f"{stats.generated_tokens} tokens in {stats.seconds:.1f} s ({speed})", file=sys.stderr)
    print(stats.cache_line(), file=sys.stderr)
    if (drafts := stats.draft_line()) is not None:
        print(drafts, file=sys.stderr)


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


def _load(told: _Told, cache: CacheForm, media: GivenMedia) -> LLM | StaticLLM:
    model, root = told.model, told.root
    with registered_names(model, root):
        overrides = {**told.where, "batch_invariant": told.batch_invariant}
        settings = told.given["settings"]
        runtime = check_config(model, root, told.given["config"], overrides, settings)
        say_division(runtime, model, root, {**overrides, **settings})
        start = time.perf_counter()
        with progress(f"loading {model}", None):
            llm = _made(told, cache, media)
    seconds = time.perf_counter() - start
    print(f"loaded {model} on {llm.device.type} in {seconds:.1f} s", file=sys.stderr)
    ranks = getattr(llm, "ranks", None)  # static caches have none
    for share in ranks.shares if ranks else ():
        print(str(share), file=sys.stderr)
    return llm


def _made(told: _Told, cache: CacheForm, media: GivenMedia) -> LLM | StaticLLM:
    settings: dict[str, Any] = {"root": told.root, **told.given, **told.where}
    if cache is CacheForm.PAGED:
        from onboard.runtime.llm import LLM

        exact = {"strict": told.strict, "batch_invariant": told.batch_invariant}
        code = {"trust_remote_code": told.trust_remote_code, "unsandboxed": told.unsandboxed}
        return LLM(told.model, **{**settings, **exact, **code}, media=media.limits)
    if told.given["settings"].get("world_size", 1) > 1:
        raise UsageError(f"--cache {cache.value} runs on one device", hint="Use --cache paged")
    if told.strict or told.batch_invariant:
        raise UsageError(
            f"--cache {cache.value} is neither strict nor batch-invariant", hint="Use --cache paged"
        )
    from onboard.runtime.static.static_llm import StaticLLM

    return StaticLLM(told.model, cache.value, **settings)


def _generate(
    llm: LLM | StaticLLM, prompts: list[Prompt], params: SamplingParams
) -> list[RequestOutput]:
    stats = llm.stats
    most = None if params.max_tokens is None else len(prompts) * params.n * params.max_tokens
    with progress("generating", most) as advance:
        outputs = llm.generate(prompts, params, on_step=lambda _: advance(stats.generated_tokens))
    _print_speed(llm)
    return outputs


def _document(
    model: str, llm: LLM | StaticLLM, outputs: list[RequestOutput], compared: Compared
) -> dict[str, Any]:
    more = {"benchmark": compared.benchmark, "pytorch": compared.pytorch}
    return {
        "model": model,
        "outputs": [asdict(output) for output in outputs],
        "limits": llm.limits,
        "stats": llm.stats.as_dict(),
        "facts": llm.facts,
        **{name: found for name, found in more.items() if found},
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
