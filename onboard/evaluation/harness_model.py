"""A model of lm-evaluation-harness: importing this registers it as `onboard`.

Each text is tokenized, cut and scored as the harness's own back end `hf` does, so that scores
differ by rounding alone.
"""

from __future__ import annotations

from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from onboard.errors import UsageError
from onboard.evaluation.continuation_scores import continuation_scores
from onboard.runtime.llm import LLM
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.tokenizer import Tokenizer

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
_LONGEST_OUTPUT = 256


@register_model("onboard")
class HarnessModel(TemplateLM):  # type: ignore[misc]
    """An onboarded model; `pretrained` is its folder, id or name, other arguments are those of
    `LLM`.

    `max_length` is the most tokens of a text, None as many as the model serves. `batch_size` and
    `max_batch_size` are for other back ends: requests run in one batch, as the engine forms it.
    """

    def __init__(
        self,
        pretrained: str,
        root: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_length: int | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        wanted: Any = {"root": root, "device": device, "dtype": dtype, **options}
        self.llm = LLM(pretrained, **wanted)
        if self.llm.engine.tokenizer is None:
            raise UsageError("the checkpoint has no tokenizer, and tasks are texts")
        self.texts: Tokenizer = self.llm.engine.tokenizer
        self.tokenizer = self.texts.hf
        self.name = pretrained
        self.max_length = min(max_length or self.llm.engine.capacity, self.llm.engine.capacity)

    @property
    def eot_token_id(self) -> int:
        """The token that ends texts."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness keeps requests."""
        return self.name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text; one that begins with the first special token has it
        already.
        """
        if add_special_tokens is None:
            first = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not (first and string.startswith(first))
        return self.texts.encode(string) if add_special_tokens else self.texts.encode_plain(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [(context, continuation) for _, context, continuation in requests]
        found = continuation_scores(self.llm, asked, self.max_length)
        for request, score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], score)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, window by window."""
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        windows = utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        parts = list(map(utils.make_disjoint_window, windows))
        return sum(score for score, _ in continuation_scores(self.llm, parts, self.max_length))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each text, until a stop text; all run together."""
        given = [normalize_gen_kwargs(request.args[1], _LONGEST_OUTPUT) for request in requests]
        params = [_sampling(each) for each in given]
        prompts = [
            self.tok_encode(request.args[0])[-self._room(each) :]
            for request, each in zip(requests, params, strict=True)
        ]
        outputs = self.llm.generate(prompts, params)
        texts = [
            postprocess_generated_text(
                generation=output.text, stop=list(each.stop), think_end_token=None
            )
            for output, each in zip(outputs, params, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _room(self, params: SamplingParams) -> int:
        """Return how many tokens of a prompt are kept; raise `UsageError` if there is no room."""
        assert params.max_tokens is not None
        if (room := self.max_length - params.max_tokens) < 1:
            raise UsageError(
                f"a task writes {params.max_tokens} tokens and a text can have {self.max_length}",
                hint="Lower max_gen_toks with --gen-kwargs, or raise max_seq_len",
            )
        return room

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the checkpoint's chat template writes it."""
        return self.texts.chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )


def _sampling(given: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a request; raise `UsageError` for what has no counterpart here."""
    rest = {key: value for key, value in given.items() if key not in _SAMPLING}
    until, most = rest.pop("until", None) or [], rest.pop("max_gen_toks")
    sampled = rest.pop("do_sample", False)
    if rest:
        raise UsageError(f"a task asks for {min(rest)}, which has no counterpart here")
    own = {key: given[key] for key in _SAMPLING if key in given} if sampled else {}
    stop = [until] if isinstance(until, str) else [text for text in until if text]
    return SamplingParams(**{"temperature": 0.0, **own, "stop": stop, "max_tokens": most})
