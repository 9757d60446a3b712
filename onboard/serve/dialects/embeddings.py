"""`POST /v1/embeddings`: OpenAI's interface for vectors of texts."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from typing import Any, Literal

import numpy as np

from onboard.serve.dialects.completions import prompts_of
from onboard.serve.dialects.events import event
from onboard.serve.dialects.fields import Body, Tokens
from onboard.serve.refusals import RefusedError
from onboard.serve.service import Service


class EmbeddingBody(Body):
    """The request; `pooling` and `normalize` are not OpenAI's."""

    model: str | None = None
    input: str | Tokens | list[str] | list[Tokens]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    stream: Literal[False] = False


class Embeddings:
    """One request, on its way."""

    def __init__(self, service: Service, body: EmbeddingBody) -> None:
        self.service, self.body = service, body
        self.model = service.check_model(body.model)
        self.texts = prompts_of(body.input, "input")
        if len(self.texts) > (most := service.settings.max_texts):
            raise RefusedError(f"{len(self.texts)} texts are more than {most}", param="input")
        self.prompts: list[list[int]] = []

    async def prepare(self) -> None:
        """Tokenize the texts."""
        for each in self.texts:
            tokens = each if isinstance(each, list) else await self.service.llm.tokenize(each)
            self.prompts.append(tokens)

    async def whole(self) -> dict[str, Any]:
        """Return the vectors."""
        pooling, normalize = self.body.pooling, self.body.normalize
        data = []
        async with self.service.admitted():
            for index, prompt in enumerate(self.prompts):
                vector = await self.service.llm.embed(
                    prompt, pooling, normalize=normalize, lora=self.service.adapter(self.model)
                )
                written = self._written(vector.numpy())
                data.append({"object": "embedding", "index": index, "embedding": written})
        count = sum(map(len, self.prompts))
        counts = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.model, "usage": counts}

    def events(self) -> AsyncGenerator[bytes, None]:
        """Vectors do not come in pieces: nobody asks for this."""
        raise RefusedError("embeddings are not streamed", param="stream")

    def failed(self, refusal: RefusedError) -> bytes:
        """Return a refusal as an event, as other interfaces do."""
        return event(refusal.body())

    def _written(self, vector: np.ndarray[Any, Any]) -> list[float] | str:
        if self.body.dimensions not in (None, len(vector)):
            raise RefusedError(
                f"the model's vectors have {len(vector)} numbers, no others", param="dimensions"
            )
        if self.body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers
