"""The tests that every generated model file has to pass. A family's test file inherits them and
says what is its own.

The reviewer reads this file, too (`onboard/review/equivalence_checks.py`), and knows it by its digest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn
from torch.export import Dim

from onboard.analysis.tiny.tiny_sizes import ORIGINAL_POSITIONS
from onboard.hf.architecture import text_config
from onboard.hf.young_fields import without_ignored
from onboard.modeling import ONE_CODEBOOK, Codebooks
from onboard.runtime.llm import LLM
from onboard.runtime.sampling_params import SamplingParams
from onboard.testing.close_choices import DRAWS, close_choices, on_clear_texts, told_of
from onboard.testing.compare import NOTES, assert_rmse_close
from onboard.testing.distinct import continue_distinct, distinct_prompts
from onboard.testing.divided import continued, divide
from onboard.testing.models import copy_weights, generated_causal_lm, hf_causal_lm, save_weights
from onboard.testing.prompts import all_logprobs, fresh_seed, ragged_prompts, random_prompt
from onboard.testing.recorded_calls import Call, hand_own_modules, record_calls
from onboard.verify.rounding.in_float64 import InFloat64
from onboard.verify.tolerances import SAME

Continued = Iterable[tuple[list[int], list[int], list[dict[int, float]]]]
"""Prompt, the tokens that it goes on with, and the log-probabilities of every token at each."""

Read = Callable[[torch.Tensor], torch.Tensor]
"""Takes of a text's logits what is compared."""

Precision = Literal["float32", "bfloat16"]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]


@dataclass(frozen=True)
class Pair:
    """The two models with the same weights, and what happened inside transformers' on random
    prompts.
    """

    expected: Any
    actual: nn.Module
    prompts: list[dict[str, torch.Tensor]]
    calls: dict[str, list[Call]]
    device: str
    dtype: Precision
    suite: type[EquivalenceSuite]

    def limit(self, kind: str) -> float:
        """Return the largest error that is allowed a kind of block."""
        return self.suite.cpu_float32 if self.device == "cpu" else self.suite.gpu_bfloat16[kind]

    def assert_close(
        self,
        actual: torch.Tensor,
        expected: torch.Tensor,
        kind: str,
        label: str,
        exact: Exact | None = None,
    ) -> None:
        """Fail, naming both files, unless `actual` is `expected` within the limit of its kind, or
        rounds no more than it: against `exact`, where the limit is that of float32.
        """
        __tracebackhide__ = True
        exact = exact if self.limit(kind) == SAME else None
        with told_of(exact.close_choices if exact else lambda: 0):
            assert_rmse_close(actual, expected, self.limit(kind), label, self.suite.files(), exact)

    def in_float64(self, read: Read | None = None, **told: Any) -> Exact:
        """Return what computes, when it is asked, the logits that transformers' model has of a text
        in float64, or what is read of them, and counts its choices that rounding decides.
        """

        return Exact(self, told, read)

    @cached_property
    def exact_model(self) -> InFloat64:
        """Transformers' model in float64."""
        return InFloat64(copy.deepcopy(self.expected))


@dataclass(frozen=True)
class Exact:
    """What is asked of a text where a comparison of its logits fails."""

    pair: Pair
    told: dict[str, Any]
    read: Read | None

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """Return in float64 what the comparison expects."""
        found: torch.Tensor = self.pair.exact_model(**self.told).logits
        return self.read(found) if self.read else found

    def close_choices(self) -> int:
        """Return how many choices of transformers' model on this text rounding decides."""
        return close_choices(self.pair.expected, **self.told)


class EquivalenceSuite:
    """A generated model beside transformers' own with the same weights, bottom-up.

    The tests of `pair` run in float32 on the CPU, and in bfloat16 where there is a CUDA device.
    """

    reference: ClassVar[Any]
    """Transformers' class."""
    model_file: ClassVar[Path]
    """The generated file, in the folder `models` of a root."""
    config: ClassVar[Any]
    """The checkpoint's config in small: every kind of layer is there, and windows are shorter than
    the prompts.
    """
    blocks: ClassVar[dict[str, str]]
    """Path in the module tree -> kind of what is there, in the order of the tests."""
    layers: ClassVar[dict[str, str]]
    """Path of the first layer of each kind -> kind."""

    eager: ClassVar[list[str]] = []
    """Transformers' own modules beside the text model, for images and sound: texts need none."""
    codebooks: ClassVar[Codebooks] = ONE_CODEBOOK
    """What a token stands for; each codebook has logits of its own."""
    counts_positions: ClassVar[bool] = False
    """Whether transformers' model takes no positions and counts 0, 1, 2 and so on."""
    hides_padding: ClassVar[bool] = False
    """Whether transformers' model without a mask takes the padding token, which may be any text's,
    for padding.
    """
    distinct_tokens: ClassVar[bool] = False
    """Whether texts have no token twice: of equal ones transformers' model takes some by the length
    of the text, and a rank others than the whole model.
    """

    cpu_float32: ClassVar[float] = 1e-5
    """Largest rmse(actual - expected) / rmse(expected)."""
    gpu_bfloat16: ClassVar[dict[str, float]] = {
        "embedding": 0.01,
        "rotary": 0.01,
        "norm": 0.01,
        "mlp": 0.01,
        "other": 0.05,
        "attention": 0.10,
        "layer": 0.05,
        "model": 0.05,
    }
    """The same by kind, in a dtype in which another order of the same sums shows."""

    batch: ClassVar[int] = 2
    length: ClassVar[int] = 24
    starts: ClassVar[tuple[int, ...]] = (0, ORIGINAL_POSITIONS + 1)
    """Positions where prompts begin: on both sides of where RoPE that scales with length
    switches.
    """
    prompt_lengths: ClassVar[tuple[int, ...]] = (3, 17, 1, ORIGINAL_POSITIONS + 6)
    new_tokens: ClassVar[int] = 32
    divided_tokens: ClassVar[int] = 6
    """Of each prompt on several ranks."""

    def __init_subclass__(cls) -> None:
        """Leave out of the config what the installed transformers ignores."""
        super().__init_subclass__()
        if "config" in vars(cls):
            cls.config = without_ignored(cls.config)

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, request: pytest.FixtureRequest) -> Pair:
        """Make both models and record what transformers' blocks are called with."""
        device, seed = request.param, fresh_seed()
        dtype: Precision = "float32" if device == "cpu" else "bfloat16"
        expected = hf_causal_lm(cls.reference, cls.config, seed, device, dtype)
        actual = generated_causal_lm(cls.model_file, cls.config, device, dtype)
        copy_weights(expected, actual, cls.eager)
        prompts = cls.clear_prompts(expected, seed, device)
        calls = record_calls(expected, ["", *cls.blocks, *cls.layers], prompts)
        calls = hand_own_modules(calls, expected, actual)
        return Pair(expected, actual, prompts, calls, device, dtype, cls)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each device, block, layer and size of the cache."""
        caches = ["small", "large"] if self.distinct_tokens else ["small"]
        if "pair" in metafunc.fixturenames:
            own = metafunc.function.__name__ == "test_several_ranks"
            devices = ["cpu"] if own else DEVICES
            metafunc.parametrize("pair", devices, indirect=True, scope="class")
        if metafunc.function.__name__ == "test_block":
            metafunc.parametrize("path", self.blocks)
        if metafunc.function.__name__ == "test_layer":
            metafunc.parametrize("path", self.layers)
        if metafunc.function.__name__ == "test_cached_decode":
            metafunc.parametrize("cache", caches)

    def test_block(self, pair: Pair, path: str) -> None:
        """A block gives what transformers' gave for the same arguments."""
        block = pair.actual.get_submodule(path)
        for call in pair.calls[path]:
            for actual, expected in call.replay(block):
                pair.assert_close(actual, expected, self.blocks[path], path)

    def test_layer(self, pair: Pair, path: str) -> None:
        """So does a layer of each kind."""
        layer = pair.actual.get_submodule(path)
        for call in pair.calls[path]:
            for actual, expected in call.replay(layer):
                pair.assert_close(actual, expected, "layer", f"{path} ({self.layers[path]})")

    def test_model(self, pair: Pair) -> None:
        """So does the whole model."""
        for call in pair.calls[""]:
            ((actual, expected),) = call.replay(pair.actual)
            exact = pair.in_float64(**call.arguments)
            pair.assert_close(actual, expected, "model", "logits", exact)

    @torch.no_grad()
    def test_export(self, pair: Pair) -> None:
        """The exported graph takes other batches and lengths than it was traced with."""
        dynamic = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
        traced = tuple(pair.prompts[0].values())
        exported = torch.export.export(pair.actual, traced, dynamic_shapes=(dynamic, dynamic))
        graph = exported.module()
        for batch, length in [(self.batch, self.length), (self.batch + 1, self.length - 7)]:
            prompt = random_prompt(
                self.vocabulary(), batch, length, fresh_seed(), device=pair.device
            )
            actual, expected = graph(*prompt.values()).logits, pair.actual(**prompt).logits
            assert torch.isfinite(actual).all(), "the exported graph gives infinities or NaN"
            pair.assert_close(actual, expected, "model", f"export, {batch} x {length}")

    @torch.no_grad()
    @on_clear_texts
    def test_cached_decode(self, pair: Pair, tmp_path: Path, cache: str) -> None:
        """Through the cached graph each new token has the whole text's logits."""
        save_weights(pair.expected, tmp_path, self.eager)
        self.save_config(pair.expected, tmp_path)
        root, config = self.model_file.parents[1], self.cache_config(cache)
        llm = LLM(tmp_path, root=root, device=pair.device, dtype=pair.dtype, config=config)
        for prompt, tokens, logprobs in self.continued(llm):
            text = torch.tensor([prompt + tokens], device=pair.device)
            told, read = self.told(text), partial(self.log_probabilities, start=len(prompt))
            logits = pair.expected(input_ids=text, **told, use_cache=False).logits
            exact = pair.in_float64(input_ids=text, read=read, **told, use_cache=False)
            label = f"decode after {len(prompt)} tokens"
            expected = read(logits.float())
            actual = all_logprobs(logprobs)
            pair.assert_close(actual, expected, "model", label, exact)

    @torch.no_grad()
    @on_clear_texts
    def test_several_ranks(
        self, pair: Pair, tmp_path: Path, record_property: Callable[[str, object], None]
    ) -> None:
        """Ranks with a share of the weights each have the logits of one, and its greedy tokens."""
        save_weights(pair.expected, tmp_path, self.eager)
        self.save_config(pair.expected, tmp_path)
        divided = divide(tmp_path, self.model_file.parents[1])
        record_property("note", divided.note)
        for text in self.prompts(fresh_seed(), pair.device):
            for _ in range(self.divided_tokens):
                expected = pair.actual(**text).logits
                exact = pair.in_float64(**self.alone(text))
                tokens = self.greedy(expected, text["input_ids"])
                for rank, actual in enumerate(divided.logits(text)):
                    label = f"rank {rank} of {divided.world_size}"
                    pair.assert_close(actual, expected, "model", label, exact)
                    found = self.greedy(actual, text["input_ids"])
                    assert torch.equal(found, tokens), f"{label}: other tokens"
                text = continued(text, tokens)

    def log_probabilities(self, logits: torch.Tensor, start: int) -> torch.Tensor:
        """Return those of the tokens from `start` on [tokens, vocabulary], by the logits of a text
        [1, sequence, vocabulary].
        """
        return self.codebooks.log_softmax(logits[0, start - 1 : -1])

    def greedy(self, logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Return the next tokens [batch] of a text [batch, seq], by logits [batch, seq, vocabulary]."""
        last = logits[:, -1]
        if self.distinct_tokens:
            last = last.scatter(1, text, -torch.inf)
        return self.codebooks.pack(self.codebooks.split(last).argmax(dim=-1))

    def save_config(self, model: Any, folder: Path) -> None:
        """Write the config as it was before the model's constructor, which may change its own."""
        config = copy.deepcopy(self.config)
        config.architectures = model.config.architectures
        config.save_pretrained(folder)

    def continued(self, llm: LLM) -> Continued:
        """Have ragged prompts go on, in chunks, some of them preempted."""
        if self.distinct_tokens:
            texts = distinct_prompts(self.vocabulary(), self.prompt_lengths, fresh_seed())
            found = continue_distinct(llm, texts, self.new_tokens, self.vocabulary())
            return [(text, *said) for text, said in zip(texts, found, strict=True)]
        texts = ragged_prompts(self.vocabulary(), self.prompt_lengths, fresh_seed())
        params = SamplingParams(  # logits may be more than the config has tokens
            max_tokens=self.new_tokens, temperature=0.0, ignore_eos=True, logprobs=2**31
        )
        outputs = zip(texts, llm.generate(texts, params), strict=True)
        return [(text, output.token_ids, output.logprobs or []) for text, output in outputs]

    def told(self, text: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what transformers' model has to be told of a text [1, sequence] besides."""
        return {"attention_mask": torch.ones_like(text)} if self.hides_padding else {}

    def cache_config(self, cache: str) -> dict[str, Any]:
        """Return what a cached graph is run with.

        Prompts come in chunks, and in the small cache there is room for the longest sequence alone:
        another loses its pages and comes back. The large one has room for all, and pages of one
        token: steps are of one token, and a text's other tokens are in the cache.
        """
        longest = max(self.prompt_lengths) + self.new_tokens
        pages = {"max_tokens": longest, "tokens_per_block": 8}
        if cache == "large":
            pages = {"max_tokens": 8 * longest, "tokens_per_block": 1}
        return {"max_batch_size": 3, "max_num_tokens": 7, "kv_cache_config": pages}

    @classmethod
    def clear_prompts(cls, expected: Any, seed: int, device: str) -> list[dict[str, torch.Tensor]]:
        """Return prompts on which rounding decides none of the reference's choices in float32, or
        the last that are drawn; half precision is compared where it is steady.
        """
        for draw in range(DRAWS):
            prompts = cls.prompts(seed + draw, device)
            texts = [cls.alone(text) for text in prompts] if expected.dtype == torch.float32 else []
            if not (close := sum(close_choices(expected, **text) for text in texts)):
                break
            NOTES.append(f"rounding decides {close} of the reference's choices on draw {draw + 1}")
        return prompts

    @classmethod
    def prompts(cls, seed: int, device: str) -> list[dict[str, torch.Tensor]]:
        """Return a random prompt from each of `starts` on."""
        return [cls.prompt(cls.batch, cls.length, seed, device, start) for start in cls.starts]

    @staticmethod
    def alone(text: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return what transformers' model is told of whole texts, each a sequence of its own."""
        mask = torch.ones_like(text["input_ids"])
        return {**text, "attention_mask": mask, "use_cache": False}

    @classmethod
    def prompt(
        cls, batch: int, length: int, seed: int, device: str, start: int
    ) -> dict[str, torch.Tensor]:
        """Return random `input_ids` and `position_ids`, both [batch, length] int64."""
        drawn = {"counted": cls.counts_positions, "distinct": cls.distinct_tokens}
        return random_prompt(cls.vocabulary(), batch, length, seed, start, device, **drawn)

    @classmethod
    def vocabulary(cls) -> int:
        """Return how many tokens there are."""
        several = cls.codebooks.count > 1
        return cls.codebooks.tokens if several else int(text_config(cls.config).vocab_size)

    @classmethod
    def files(cls) -> str:
        """Return which two files are compared."""
        return (
            f"models/{cls.model_file.name} beside {cls.reference.__module__.replace('.', '/')}.py"
        )


class FirstPositionSuite(EquivalenceSuite):
    """The suite of a model whose positions begin at another number than 0."""

    first_position: ClassVar[int]
    """Of a text whose positions are not given; padding tokens would not be counted."""

    def told(self, text: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the positions of texts [batch, sequence] that are read from their beginning."""
        counted = self.first_position + torch.arange(text.shape[1], device=text.device)
        return {"position_ids": counted.expand_as(text)}

    @torch.no_grad()
    def test_first_position(self, pair: Pair) -> None:
        """Positions that are not given begin there in transformers' model."""
        size = (self.batch, self.length)
        text = torch.randint(16, self.vocabulary(), size, device=pair.device)  # no special tokens
        actual = pair.expected(input_ids=text, **self.told(text), use_cache=False).logits
        expected = pair.expected(input_ids=text, use_cache=False).logits
        pair.assert_close(actual, expected, "model", "positions")
