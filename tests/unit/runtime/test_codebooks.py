"""Texts that hold a code of each of several codebooks at a position: one token here, a row for each
in transformers.

What is expected is asked of transformers by hand, with rows that nothing of ours has made.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, MusicgenForCausalLM

from onboard import LLM, SamplingParams
from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_small
from onboard.cache.next_token import choose_codes
from onboard.cache.rows import SequenceRows
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError, UsageError
from onboard.graph.factory import ModelFactory
from onboard.hf.codebooks import codebooks_of, with_tokens
from onboard.modeling import ONE_CODEBOOK, Codebooks
from onboard.ops.sampling.sampling import NOT_A_TOKEN, choose_tokens, uniforms
from onboard.runtime.logprobs import logprobs
from onboard.verify.blocks import prove

COUNT = 3
CACHE = {  # prompts come in chunks, and there is no room for all texts at once
    "max_batch_size": 3,
    "max_num_tokens": 7,
    "kv_cache_config": {"max_tokens": 48, "tokens_per_block": 4},
}


@dataclass
class Small:
    """A random checkpoint, transformers' model of it, and what onboard makes of that."""

    folder: Path
    hf: Any
    spec: ModelSpec
    source: str

    @property
    def size(self) -> int:
        return int(self.hf.model.decoder.embed_tokens[0].num_embeddings)

    def codes(self, length: int) -> list[tuple[int, ...]]:
        return [tuple(row) for row in torch.randint(self.size, (length, COUNT)).tolist()]

    @torch.no_grad()
    def logits(self, codes: list[tuple[int, ...]]) -> torch.Tensor:
        """Return transformers' own logits [tokens, codebooks, codes] of one text."""
        rows = torch.tensor(codes).T.contiguous()
        return self.hf(input_ids=rows, use_cache=False).logits.transpose(0, 1)

    def greedy(self, codes: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
        known = list(codes)
        for _ in range(count):
            known.append(tuple(self.logits(known)[-1].argmax(dim=-1).tolist()))
        return known[len(codes) :]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder, seed = tmp_path_factory.mktemp("codebooks"), int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    config = AutoConfig.for_model("musicgen_decoder", num_codebooks=COUNT, eos_token_id=5)
    model: Any = build_small(tiny_config(config), seed)
    model.save_pretrained(folder)
    spec = analyze(model.config.to_dict(), model="x")
    source = generate_model_file(spec)
    (folder / "models").mkdir()
    (folder / "models" / f"modeling_{spec.family}.py").write_text(source)
    hf = MusicgenForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return Small(folder, hf, spec, source)


@pytest.fixture(scope="module")
def llm(small: Small) -> LLM:
    return LLM(small.folder, root=small.folder, device="cpu", dtype="float32", config=CACHE)


def test_tokens_are_codes_and_codes_tokens() -> None:
    books = Codebooks(4, 2049)
    codes = torch.randint(2049, (5, 4))
    assert torch.equal(books.unpack(books.pack(codes)), codes)
    assert books.pack(torch.tensor([1, 2, 3, 4])) == 1 + 2 * 2049 + 3 * 2049**2 + 4 * 2049**3
    assert books.pack(torch.full((4,), 2048)) == books.tokens - 1
    assert ONE_CODEBOOK.unpack(torch.tensor([7])).tolist() == [[7]]


def test_tokens_that_64_bits_cannot_hold_are_refused() -> None:
    assert Codebooks(5, 2049).tokens < 2**63
    with pytest.raises(
        OnboardError, match="a code of each of 6 codebooks of 2049, which 64 bits cannot hold"
    ):
        Codebooks(6, 2049)


@pytest.mark.parametrize("error", [AssertionError, AttributeError, NotImplementedError])
def test_a_model_that_does_not_say_where_its_head_is_has_one_codebook(
    error: type[Exception],
) -> None:
    class Silent(torch.nn.Module):
        def get_input_embeddings(self) -> torch.nn.Module:
            return torch.nn.Embedding(3, 2)

        def get_output_embeddings(self) -> torch.nn.Module:
            raise error("not to be asked")

    assert codebooks_of(Silent()) == ONE_CODEBOOK


def test_transformers_reads_tokens(small: Small) -> None:
    """A batch of two texts, and copies of the model: they answer with their own weights."""
    texts = [small.codes(9), small.codes(9)]
    model = with_tokens(copy.deepcopy(small.hf))
    books = codebooks_of(model)
    assert (books.count, books.size) == (COUNT, small.size)
    tokens, twice = books.pack(torch.tensor(texts)), copy.deepcopy(model)
    twice.lm_heads[1].weight.data *= 2
    with torch.no_grad():
        actual = books.split(
            model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        )
        other = books.split(twice(input_ids=tokens, use_cache=False).logits)
    expected = torch.stack([small.logits(text) for text in texts])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(other, expected * torch.tensor([1, 2, 1])[:, None])


def test_a_generated_file_that_mixes_codebooks_up_is_refused(small: Small) -> None:
    assert small.source.count("input[:, codebook]") == 1
    with pytest.raises(OnboardError, match="embed_tokens.1"):
        prove(small.source.replace("input[:, codebook]", "input[:, 0]"), small.spec, export=False)
    with pytest.raises(OnboardError, match="differs from transformers"):
        prove(
            small.source.replace("for head in self.lm_heads]", "for head in self.lm_heads][::-1]"),
            small.spec,
        )


def test_ragged_texts_in_chunks_and_preempted_go_on_as_transformers(small: Small, llm: LLM) -> None:
    texts = [small.codes(length) for length in (3, 17, 1, 26)]
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    outputs = llm.generate([llm.pack(text) for text in texts], params)
    assert llm.engine.stats.preemptions > 0
    for text, output in zip(texts, outputs, strict=True):
        expected = small.greedy(text, 12)  # code 5 of some codebook ends nothing
        assert llm.unpack(output.token_ids) == expected
        rows = small.logits([*text, *expected])[len(text) - 1 : -1].log_softmax(dim=-1)
        for codes, row, found in zip(expected, rows, output.logprobs or [], strict=True):
            chosen = [found[k * row.shape[1] + code] for k, code in enumerate(codes)]
            torch.testing.assert_close(torch.tensor(chosen), row.amax(dim=-1))
            assert len(found) == 2 * COUNT
    assert any("a code of each of 3 codebooks" in fact for fact in llm.engine.facts)


def test_logits_are_those_of_one_codebook_after_the_other(small: Small, llm: LLM) -> None:
    text = small.codes(11)
    torch.testing.assert_close(
        llm.logits(llm.pack(text)), small.logits(text).flatten(1), atol=1e-5, rtol=1e-4
    )


def test_drawn_tokens_are_a_requests_own(small: Small, llm: LLM) -> None:
    texts = [small.codes(5), small.codes(8)]
    prompts = [llm.pack(text) for text in texts]
    params = [SamplingParams(max_tokens=6, seed=seed, top_k=40, ignore_eos=True) for seed in (1, 2)]
    both = [output.token_ids for output in llm.generate(prompts, params)]
    alone = [
        llm.generate(prompt, own)[0].token_ids for prompt, own in zip(prompts, params, strict=True)
    ]
    assert both == alone
    assert (
        llm.generate(prompts[0], SamplingParams(max_tokens=6, seed=3, top_k=40))[0].token_ids
        != both[0]
    )


def test_a_token_ends_a_text_and_others_are_refused(small: Small, llm: LLM) -> None:
    text = small.codes(4)
    third = small.greedy(text, 3)[-1]
    params = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=llm.pack([third]))
    assert llm.generate(llm.pack(text), params)[0].finish_reason == "stop"
    with pytest.raises(UsageError, match="a position has codes"):
        llm.pack([(0, 0, small.size)])
    with pytest.raises(UsageError, match="a position has codes"):
        llm.pack([(0, 0)])
    with pytest.raises(UsageError, match="a prompt has token"):
        llm.generate([small.size**COUNT])
    with pytest.raises(UsageError, match="tokens are codes, no text"):
        llm.generate("x")
    with pytest.raises(UsageError, match="Tokens are whole numbers; LLM.pack makes them of codes"):
        llm.generate([[text[0]]])
    with pytest.raises(UsageError, match="stop texts need a tokenizer"):
        llm.generate(llm.pack(text), SamplingParams(stop=["x"]))


@pytest.mark.parametrize("mode", ["hf", "transformers"])
def test_transformers_own_module_is_refused(small: Small, mode: Any) -> None:
    factory = ModelFactory(small.folder, root=None, dtype=torch.float32, model_kwargs={}, mode=mode)
    with pytest.raises(
        OnboardError, match="texts of one code a position, MusicgenForCausalLM has 3 codebooks"
    ):
        factory.build_model()


def test_tables_have_the_dtype_that_transformers_makes_them_in(small: Small) -> None:
    """Else a model in half precision computes in float32 from its positions on, or not at all."""
    factory = ModelFactory(small.folder, root=small.folder, dtype=torch.bfloat16, model_kwargs={})
    theirs = MusicgenForCausalLM.from_pretrained(small.folder, dtype=torch.bfloat16)
    ours, expected = dict(factory.build_model().named_buffers()), dict(theirs.named_buffers())
    assert ours.keys() == expected.keys()
    assert all(
        torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype
        for name, tensor in expected.items()
    )


def _how(rows: int, temperature: float) -> list[torch.Tensor]:
    return [torch.full((rows,), value) for value in (temperature, 0.0, 1.0, 0.0)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_each_codebook_has_a_choice_of_its_own(temperature: float) -> None:
    books, logits = Codebooks(3, 12), torch.randn(50, 3, 11)
    uniform = torch.rand(50, 3, dtype=torch.float64)
    chosen = books.unpack(choose_codes(logits.flatten(1), [*_how(50, temperature), uniform], books))
    for k in range(3):
        assert torch.equal(
            chosen[:, k], choose_tokens(logits[:, k], *_how(50, temperature), uniform[:, k])
        )


def test_one_codebook_without_a_choice_leaves_no_token() -> None:
    books, logits = Codebooks(2, 12), torch.randn(4, 22)
    logits[2, 15] = torch.nan
    chosen = choose_codes(logits, [*_how(4, 0.0), torch.rand(4, 2, dtype=torch.float64)], books)
    assert (chosen == NOT_A_TOKEN).tolist() == [False, False, True, False]


def test_the_numbers_of_a_token_are_independent() -> None:
    """As they are drawn for a running text: of each place and codebook one."""
    rows = SequenceRows(2, 8, 1, codebooks=COUNT)
    places = 30 * np.arange(2)[:, None] + np.arange(30)
    host = {
        name: np.zeros((30,), dtype=np.float32)
        for name in ("temperature", "top_k", "top_p", "min_p")
    }
    host["uniform"] = np.zeros((30, COUNT))
    rows.set_sampling(1, (1.0, 0, 1.0, 0), key=7)
    drawn = []
    for lengths in places:
        rows.write_sampling(host, np.ones(30, dtype=np.int64), lengths)
        drawn.append(host["uniform"].copy())
    numbers = np.concatenate(drawn)
    assert len(np.unique(numbers)) == numbers.size
    key = np.full(numbers.size, 7, dtype=np.uint64)
    np.testing.assert_array_equal(
        np.sort(numbers.flatten()), np.sort(uniforms(key, np.arange(numbers.size)))
    )


def test_log_probabilities_are_those_of_a_codebook() -> None:
    row, books = torch.randn(22), Codebooks(2, 12)
    expected = row.view(2, 11).log_softmax(dim=-1).flatten()
    found = logprobs(row[None], [int(books.pack(torch.tensor([3, 4])))], 2, books)[0]
    best = {
        int(index) + 11 * k
        for k, part in enumerate(row.view(2, 11))
        for index in part.topk(2).indices
    }
    assert found.keys() == best | {3, 15}
    assert all(found[column] == pytest.approx(float(expected[column])) for column in found)
