"""Images that clients send: the answers are those of transformers, and what is hostile gets a 4xx."""

from __future__ import annotations

import base64
import json
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from onboard.errors import ConsentRequiredError
from onboard.media.media_limits import MediaLimits
from onboard.runtime.calls.prompt_reader import PromptReader
from tests.support.https_server import HOST, Network, content, network, redirect
from tests.support.runtime.media_models import MediaModel, make_media_model
from tests.support.serving import served, speaking_model

TOKENS = 4
CHAT = "/v1/chat/completions"
RED, BLUE = (Image.new("RGB", (40, 30), colour) for colour in ((200, 30, 40), (20, 30, 250)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MediaModel:
    return make_media_model(tmp_path_factory.mktemp("llava"), "llava")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with (
        pytest.MonkeyPatch.context() as patch,
        network(tmp_path_factory.mktemp("network"), patch) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def address(model: MediaModel, net: Network) -> Iterator[str]:
    limits = MediaLimits(allowed_media_domains=[HOST], max_media=3, max_fetch_seconds=0.5)
    with served(model, limits) as (found, _):
        yield found


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(where: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": where}}


def asked(address: str, *parts: Any, path: str = CHAT, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 0, **more}
    return httpx.post(f"{address}{path}", json=body, timeout=120)


def said(answer: httpx.Response) -> list[str]:
    """The texts of the answer's tokens."""
    assert answer.status_code == 200, answer.text
    return [each["token"] for each in answer.json()["choices"][0]["logprobs"]["content"]]


def expected(model: MediaModel, text: str, *images: Image.Image) -> list[str]:
    tokens = model.greedy(text, TOKENS, **({"images": list(images)} if images else {}))
    return [model.processor.tokenizer.decode([token]) for token in tokens]


def test_answers_are_those_of_transformers(model: MediaModel, address: str, net: Network) -> None:
    net.answers["/blue.png"] = content(png(BLUE))
    what = {"type": "text", "text": "what?"}
    red, blue = part(url(png(RED))), part(f"https://{HOST}/blue.png")
    cases = [
        ([red, what], "[user]<image>what?[assistant]", [RED]),
        ([red, what, blue], "[user]<image>what?<image>[assistant]", [RED, BLUE]),
        ([blue], "[user]<image>[assistant]", [BLUE]),
        ([what], "[user]what?[assistant]", []),
    ]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda case: asked(address, *case[0]), cases))
    for (_, text, images), answer in zip(cases, answers, strict=True):
        assert said(answer) == expected(model, text, *images)
        given = model.processor(text=[text], **({"images": images} if images else {}))
        assert answer.json()["usage"]["prompt_tokens"] == len(given["input_ids"][0])


def test_other_interfaces_take_images(model: MediaModel, address: str) -> None:
    data = png(RED)
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": TOKENS}
    length = model.processor(text=["[user]<image>what?[assistant]"], images=[RED])["input_ids"]
    counted = httpx.post(f"{address}/v1/messages/count_tokens", json=body, timeout=60)
    assert counted.json() == {"input_tokens": len(length[0])}
    items = [
        {"type": "input_image", "image_url": url(data)},
        {"type": "input_text", "text": "what?"},
    ]
    answer = httpx.post(
        f"{address}/v1/responses",
        json={"input": [{"role": "user", "content": items}], "max_output_tokens": 1},
        timeout=60,
    )
    assert answer.json()["usage"]["input_tokens"] == len(length[0])


def bomb() -> bytes:
    """A PNG of 60,000 x 60,000 pixels, which would be 10.8 GB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(1 << 24), 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + rows + chunk(b"IEND", b"")


def drip(handler: BaseHTTPRequestHandler) -> None:
    with suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:  # until the other side goes
            handler.wfile.write(b"x")
            time.sleep(0.02)


def test_what_is_hostile_is_refused_and_the_server_lives_on(
    model: MediaModel, address: str, net: Network, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(RED))
    net.answers |= {"/away": redirect("https://127.0.0.1/a"), "/slow": drip}
    net.answers["/large"] = content(b"", Content_Length=str(1 << 40))
    net.names |= {"inside.example": [["10.0.0.7"]]}
    frames = png(RED, "GIF", save_all=True, append_images=[BLUE])
    cases: dict[str, list[Any]] = {
        "more pixels|pixels, and": [part(url(bomb()))],
        "animated": [part(url(frames))],
        "broken": [part(url(png(RED)[:60]))],
        "no format": [part(url(b"<svg/>"))],
        "not base64": [part("data:image/png;base64,*")],
        "127.0.0.1' is no host": [part("https://127.0.0.1/a.png")],
        "inside.example' is no host": [part("https://inside.example/a.png")],
        "redirects to '127.0.0.1'": [part(f"https://{HOST}/away")],
        "takes too long": [part(f"https://{HOST}/slow")],
        "sends more than": [part(f"https://{HOST}/large")],
        "no place of an image": [part(str(secret))],
        "no place of": [part(f"file://{secret}")],
        "no place": [part(f"http://{HOST}/a.png")],
        "more than 3 images": [part(url(png(RED)))] * 4,
        "has no url": [part(None)],
        "has no": [part({"url": 5})],
        "is no host": [{"type": "image", "image": "https://other.example/a"}],
        "takes no sound": [
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
        ],
        "part of type 'video_url'": [{"type": "video_url", "video_url": {"url": "x"}}],
        "refuses these images": [part(url(png(RED))), {"type": "text", "text": "<image>"}],
    }
    for reason, parts in cases.items():
        answer = asked(address, *parts)
        assert answer.status_code == 400, (reason, answer.text)
        message = answer.json()["error"]["message"]
        assert any(each in message for each in reason.split("|")) or "WAV" in message, message
        assert "\n" not in message
    assert httpx.get(f"{address}/health").status_code == 200
    text = {"type": "text", "text": "what?"}
    assert said(asked(address, text)) == expected(model, "[user]what?[assistant]")


def test_a_model_of_text_alone_fetches_nothing(tmp_path: Path, net: Network) -> None:
    net.answers["/seen"] = content(png(RED))
    connected = len(net.connected)
    limits = MediaLimits(allowed_media_domains=[HOST])
    with served(speaking_model(tmp_path), limits) as (address, _):
        answer = asked(address, part(f"https://{HOST}/seen"))
    assert answer.status_code == 400
    assert "text alone" in json.dumps(answer.json())
    assert len(net.connected) == connected


def test_nobody_asks_a_client_to_agree_to_code(
    model: MediaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of a repository that would read images is the server's matter."""

    def refused(_: PromptReader) -> None:
        raise ConsentRequiredError("code would be run", hint="Run again in /a/folder")

    monkeypatch.setattr(PromptReader, "processor", property(refused))
    with served(model) as (address, _):
        answer = asked(address, part(url(png(RED))))
    assert answer.status_code == 400
    assert "the model takes text alone" in answer.text
    assert "/a/folder" not in answer.text
