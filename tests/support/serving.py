"""A server of a tiny model with a tokenizer and a chat template, on a free port."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from onboard.cli.commands.demo import CHECKPOINT
from onboard.content import CONTENT_ROOT
from onboard.media.media_limits import MediaLimits
from onboard.serve.app import create_app
from onboard.serve.serve_settings import ServeSettings
from onboard.serve.server import load_service
from onboard.serve.service import Service
from tests.support.runtime.media_models import MediaModel
from tests.support.runtime.paused import SECONDS, wait_until
from tests.support.runtime.tiny import Tiny, make_tiny, save_tokenizer

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

TEXT = (
    'the cat sat on the mat and the dog sat on the cat {"name": "weather", "arguments": {"city":'
    ' "Rome", "days": 3}} true false null yes no <think> </think> <tool_call> </tool_call>'
)
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if mood %}[{{ mood }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def speaking_model(folder: Path, template: str | None = TEMPLATE, **options: Any) -> Tiny:
    """A random model with a byte-level tokenizer, whose end-of-text token is 0: never the likeliest
    one, so that answers end by their length.
    """
    size = save_tokenizer(folder / "tokenizer", TEXT)
    model = make_tiny(
        folder,
        **{"vocab_size": size, "eos_token_id": 0, "max_position_embeddings": 1024, **options},
    )
    model.hf.get_output_embeddings().weight.data[0] = 0.0
    model.hf.save_pretrained(model.checkpoint)
    shutil.copytree(folder / "tokenizer", model.checkpoint, dirs_exist_ok=True)
    path = model.checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if template is not None:
        path.write_text(json.dumps({**config, "chat_template": template}))
    return model


@dataclass(frozen=True)
class Onboarded:
    """A checkpoint, and the root whose registry and model files it runs with."""

    checkpoint: Path
    root: Path


DEMO = Onboarded(CHECKPOINT, CONTENT_ROOT)


@contextmanager
def served(
    model: Tiny | MediaModel | Onboarded,
    media: MediaLimits | None = None,
    lora: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[tuple[str, Service]]:
    """Serve a model; yield the address and the service."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = ServeSettings(**{"names": ["tiny"], "port": port, "drain_seconds": 5, **settings})
    limits = {"max_batch_size": 8} if model is DEMO else {"max_batch_size": 8, "max_seq_len": 1024}
    service = load_service(
        str(model.checkpoint),
        told,
        root=model.root,
        device="cpu",
        dtype="float32",
        settings=limits,
        media=media,
        lora=lora,
    )
    config = uvicorn.Config(
        create_app(service),
        port=port,
        log_level="error",
        timeout_keep_alive=int(SECONDS),  # a client that is slow finds its connection as it left it
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}", service
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


def client_of_openai(url: str) -> OpenAI:
    """Return OpenAI's own client, whose import takes seconds: no worker needs it to collect tests."""
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def client_of_anthropic(url: str) -> Anthropic:
    """Return Anthropic's own client, imported as late."""
    from anthropic import Anthropic

    return Anthropic(base_url=url, api_key="none", max_retries=0)
