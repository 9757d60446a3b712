"""The texts of requests: one that has gone leaves nothing to the next."""

from __future__ import annotations

from pathlib import Path

from onboard.runtime.calls.request_texts import RequestTexts
from onboard.runtime.sampling_params import SamplingParams
from onboard.runtime.scheduling.request import Request
from onboard.runtime.tokenizer import Tokenizer
from tests.support.runtime.tiny import save_tokenizer


def made(prompt: list[int], generated: list[int]) -> Request:
    request = Request(prompt, SamplingParams(stop=["never said"]), key=0)
    request.tokens += generated
    return request


def test_a_request_never_gets_the_text_of_one_that_has_gone(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "the cat sat on the mat")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    texts = RequestTexts(tokenizer)
    tokens = tokenizer.encode("the cat")
    for place in range(200):  # the interpreter gives the same addresses again, soon
        ended = made(tokens, tokens)
        assert texts.so_far(ended) == "the cat"
        if place % 2:
            texts.finish(ended)
            assert texts.certain(ended) == "the cat" == texts.so_far(ended)
        del ended
        assert texts.so_far(made(tokens, [])) == ""
