"""`POST /tokenize` and `/detokenize`: texts as token ids, and back, as vLLM has them."""

from __future__ import annotations

from typing import Any

from onboard.serve.dialects.conversation import as_messages, functions
from onboard.serve.dialects.fields import Body, Tokens
from onboard.serve.refusals import RefusedError
from onboard.serve.service import Service


class TokenizeBody(Body):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    async def tokenized(self, service: Service) -> dict[str, Any]:
        """Return the token ids, how many, and how many the model takes."""
        service.check_model(self.model)
        if self.messages is not None:
            options = {"add_generation_prompt": self.add_generation_prompt}
            tools = functions(self.tools) or None
            tokens = (await service.chat_prompt(as_messages(self.messages), tools, options)).tokens
        elif self.prompt is not None:
            encode = service.llm.tokenize if self.add_special_tokens else service.llm.tokenize_plain
            tokens = await encode(self.prompt)
        else:
            raise RefusedError("there is neither prompt nor messages", param="prompt")
        return {"count": len(tokens), "max_model_len": service.capacity, "tokens": tokens}


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: Tokens

    def detokenized(self, service: Service) -> dict[str, Any]:
        """Return the text."""
        service.check_model(self.model)
        size = service.llm.llm.engine.vocab_size or 1 << 31
        if bad := [token for token in self.tokens if not 0 <= token < size]:
            raise RefusedError(f"there is no token {bad[0]}", param="tokens")
        return {"prompt": service.text_of(self.tokens)}
