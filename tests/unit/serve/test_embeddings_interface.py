"""`/v1/embeddings` by OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onboard.serve.service import Service
from tests.support.serving import client_of_openai, served, speaking_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    with served(speaking_model(tmp_path_factory.mktemp("served"))) as found:
        yield found


def test_openais_client_gets_them(server: tuple[str, Service]) -> None:
    """It asks for base64, and for numbers."""
    client = client_of_openai(server[0])
    texts = ["the cat", "the dog sat on the mat"]
    encode = server[1].llm.llm.encode

    async def direct(text: str) -> torch.Tensor:
        return await server[1].llm.embed(text)

    expected = [asyncio.run(direct(text)).tolist() for text in texts]
    for given in (texts, [encode(text) for text in texts]):
        for form in ({}, {"encoding_format": "float"}):
            found = client.embeddings.create(model="tiny", input=given, **form)
            assert [each.index for each in found.data] == [0, 1]
            for each, vector in zip(found.data, expected, strict=True):
                assert each.embedding == pytest.approx(vector, abs=1e-6)
            assert found.usage.prompt_tokens == sum(len(encode(text)) for text in texts)
    single = client.embeddings.create(model="tiny", input="the cat")
    assert single.data[0].embedding == pytest.approx(expected[0], abs=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input": []}, "no input"),
        ({"input": ""}, "no tokens"),
        ({"input": "a", "dimensions": 3}, "no others"),
        ({"input": ["a"] * 2049}, "more than 2048"),
        ({"input": [10**9]}, "token 1000000000"),
        ({"input": "the " * 2000}, "can have"),
        ({"input": "a", "extra_body": {"stream": True}}, "stream"),
        ({"input": "a", "extra_body": {"pooling": "most"}}, "pooling"),
    ],
)
def test_what_has_no_vector(server: tuple[str, Service], given: Any, words: str) -> None:
    from openai import BadRequestError

    client = client_of_openai(server[0])
    with pytest.raises(BadRequestError, match=words):
        client.embeddings.create(model="tiny", **given)
