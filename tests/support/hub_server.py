"""A Hub on loopback: folders served over the protocol that huggingface_hub speaks.

    with HubServer({"acme/tiny": Repository(folder)}) as hub:
        subprocess.run([...], env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": ...})

The client reads HF_ENDPOINT when it is imported, so that it has to run in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from safetensors import SafetensorError, safe_open


@dataclass
class Repository:
    """A model repository; `revisions` are other branches or tags, `gated` ones list their files and
    serve none.
    """

    main: Path
    revisions: dict[str, Path] = field(default_factory=dict)
    gated: bool = False

    def folder(self, revision: str) -> Path | None:
        known = {"main": self.main, **self.revisions}
        by_commit = {commit(folder): folder for folder in known.values()}
        return known.get(revision) or by_commit.get(revision)


def commit(folder: Path) -> str:
    """Return a commit id that changes with the folder's content."""
    digest = hashlib.sha1(usedforsecurity=False)
    for path in files(folder):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


class HubServer:
    """Serves repositories on 127.0.0.1 and remembers the requests."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def downloads(self) -> set[str]:
        """Return the names of the files that were fetched."""
        gets = (
            line.split(" ", 1)[1]
            for line in self.requests
            if line.startswith("GET ") and "/resolve/" in line
        )
        return {path.split("/resolve/", 1)[1].split("/", 1)[1] for path in gets}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            def do_HEAD(self) -> None:
                hub._answer(self)

            def log_message(self, *_: Any) -> None:
                """Keep the tests' output clean."""

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path}")
        if path == "/api/models":
            self._list_models(request)
        elif path.startswith("/api/models/"):
            self._api(request, path.removeprefix("/api/models/").split("/"))
        elif "/resolve/" in path:
            name, rest = path[1:].split("/resolve/", 1)
            self._resolve(request, name, *rest.split("/", 1))
        else:
            _send(request, 404, b"{}")

    def _list_models(self, request: BaseHTTPRequestHandler) -> None:
        query = parse_qs(urlsplit(request.path).query)
        author, search, kind = (query.get(key, [""])[0] for key in ("author", "search", "filter"))
        found = [
            name
            for name in self.repositories
            if name.startswith(f"{author}/") and search in name.lower()
        ]
        listed = [{"id": name, **_facts(self.repositories[name].folder("main"))} for name in found]
        wanted = {"id", "tags", *query.get("expand", [])}
        tagged = [facts for facts in listed if kind in ("", *facts["tags"])]
        _send_json(
            request,
            [{key: facts[key] for key in sorted(wanted & facts.keys())} for facts in tagged],
        )

    def _api(self, request: BaseHTTPRequestHandler, parts: list[str]) -> None:
        repository = self.repositories.get("/".join(parts[:2]))
        if repository is None:
            # As the real Hub answers a caller without a token: 401, so that private models do not
            # show.
            _send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        revision = parts[3] if len(parts) > 3 else "main"
        folder = repository.folder(revision)
        if folder is None:
            _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif len(parts) > 2 and parts[2] == "tree":
            _send_json(request, list(_tree(folder)))
        else:
            siblings = [{"rfilename": entry["path"]} for entry in _tree(folder)]
            _send_json(
                request,
                {
                    "id": "/".join(parts[:2]),
                    "sha": commit(folder),
                    "tags": [],
                    "siblings": siblings,
                },
            )

    def _resolve(
        self, request: BaseHTTPRequestHandler, name: str, revision: str, path: str
    ) -> None:
        repository = self.repositories.get(name)
        if repository is None:
            _send(request, 401, b"", {"X-Error-Code": "RepoNotFound"})
            return
        folder = repository.folder(revision)
        if folder is None:
            _send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif repository.gated:
            _send(
                request,
                401,
                b"",
                {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {name} is restricted"},
            )
        elif not (folder / path).is_file():
            _send(
                request,
                404,
                b"",
                {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit(folder)},
            )
        else:
            headers = {"ETag": f'"{oid(folder / path)}"', "X-Repo-Commit": commit(folder)}
            _send(request, 200, (folder / path).read_bytes(), headers)


def _tree(folder: Path) -> Iterator[dict[str, Any]]:
    for path in files(folder):
        name = path.relative_to(folder).as_posix()
        yield {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid(path)}


def _facts(folder: Path | None) -> dict[str, Any]:
    """Return what the Hub lists of a model beside its name."""
    if folder is None or not (folder / "config.json").is_file():
        return {"tags": []}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shown = {key: config[key] for key in ("architectures", "model_type") if key in config}
    total = 0
    for path in folder.glob("*.safetensors"):
        with suppress(SafetensorError), safe_open(path, "pt") as weights:
            total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return {
        "tags": [config.get("model_type", "")],
        "config": shown,
        "safetensors": {"total": total, "parameters": {}},
    }


def _send_json(request: BaseHTTPRequestHandler, data: Any) -> None:
    _send(request, 200, json.dumps(data).encode(), {"Content-Type": "application/json"})


def _send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
