"""An endpoint on loopback that speaks OpenAI's chat completions: streams, calls of tools, errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Turn:
    """What the endpoint does with one request."""

    text: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Chunks after which the connection is closed."""
    usage: tuple[int, int] | None = (100, 10)

    def chunks(self) -> Iterator[dict[str, Any]]:
        for at in range(0, len(self.text), 7):  # in pieces, as endpoints send them
            yield {"choices": [{"index": 0, "delta": {"content": self.text[at : at + 7]}}]}
        for index, (name, arguments) in enumerate(self.calls):
            text = json.dumps(arguments)
            head = {"index": index, "id": f"call_{index}", "type": "function"}
            yield _call({**head, "function": {"name": name, "arguments": text[:5]}})
            for at in range(5, len(text), 50):
                yield _call({"index": index, "function": {"arguments": text[at : at + 50]}})
        reason = "tool_calls" if self.calls else "stop"
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
        if self.usage is not None:
            prompt, completion = self.usage
            yield {
                "choices": [],
                "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
            }


def _call(part: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]}


@dataclass
class Endpoint:
    """The turns to come, and the requests that were made."""

    turns: list[Turn]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def serving(*turns: Turn) -> Iterator[Endpoint]:
    """Serve on loopback; each request takes the next turn."""
    endpoint = Endpoint(list(turns))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            assert self.path == "/v1/chat/completions"
            endpoint.requests.append(json.loads(self.rfile.read(length)))
            endpoint.keys.append(self.headers.get("Authorization"))
            self._answer(endpoint.turns.pop(0))

        def _answer(self, turn: Turn) -> None:
            self.send_response(turn.status)
            for name, value in turn.headers.items():
                self.send_header(name, value)
            if turn.status != 200:
                body = json.dumps({"error": {"message": "as planned", "type": "test"}}).encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for count, chunk in enumerate(turn.chunks()):
                if count == turn.cut_after:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._send(f"data: {json.dumps(chunk)}\n\n")
            self._send("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")

        def _send(self, text: str) -> None:
            data = text.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
