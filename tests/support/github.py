"""GitHub on loopback: the REST routes that a pull request needs, with real shapes, headers and faults,
and a bare repository for what is pushed.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "ghp_5ecr3tT0kenOfTheTests"
NAME = "acme/models"
BOT = "onboard-agent"
MOST = 65_536


@dataclass
class Fault:
    """What goes wrong with a request: before it is carried out, or after."""

    method: str
    path: str
    """A pattern that is looked for in the path."""
    status: int = 0
    """The answer; 0: none, the connection is cut."""
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    after: bool = False
    """It is carried out first."""
    times: int = 1
    skip: int = 0
    """So many such requests pass before."""


@dataclass
class Request:
    method: str
    path: str
    body: Any
    authorization: str


Answer = tuple[int, Any]


@dataclass
class GitHub:
    """The state of a repository with its pull requests; tests play the people."""

    bare: Path
    url: str = ""
    default_branch: str = "main"
    protected: set[str] = field(default_factory=lambda: {"main"})
    pulls: list[dict[str, Any]] = field(default_factory=list)
    comments: list[dict[str, Any]] = field(default_factory=list)
    inline: list[dict[str, Any]] = field(default_factory=list)
    reviews: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    before: Callable[[Request], bool] = lambda _: False
    """Called with every request; where it says so, that is not carried out."""
    after: Callable[[Request], bool] = lambda _: False
    """Called when a request was carried out, before it is answered."""
    login_is_hidden: bool = False
    clock: int = 0
    lock: Any = field(default_factory=threading.RLock)

    # What people do

    def say(self, login: str, body: str, association: str = "OWNER", **more: Any) -> int:
        """Comment on the pull request; return the comment's id."""
        with self.lock:
            self.comments.append(self._comment("issues/comments", login, body, association) | more)
            return int(self.comments[-1]["id"])

    def say_inline(
        self,
        login: str,
        body: str,
        path: str,
        line: int | None,
        association: str = "OWNER",
        first: int | None = None,
        thread: int | None = None,
    ) -> int:
        """Comment on lines."""
        place = {"path": path, "line": line, "start_line": first, "in_reply_to_id": thread}
        place |= {"original_line": line, "original_start_line": first, "side": "RIGHT"}
        place |= {
            "diff_hunk": self._hunk(path, line),
            "commit_id": self.head(1),
            "original_commit_id": self.head(1),
        }
        with self.lock:
            self.inline.append(self._comment("pulls/comments", login, body, association) | place)
            return int(self.inline[-1]["id"])

    def _hunk(self, path: str, line: int | None) -> str:
        """The hunk of a new file, up to a line."""
        words = ["git", "show", f"{self.head(1)}:{path}"]
        done = subprocess.run(words, cwd=self.bare, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        return "\n".join([f"@@ -0,0 +1,{len(lines)} @@", *(f"+{each}" for each in lines[:line])])

    def review(
        self, login: str, state: str, body: str = "", association: str = "OWNER", commit: str = ""
    ) -> int:
        """Submit a review."""
        with self.lock:
            made = self._comment("pulls/reviews", login, body, association)
            submitted = None if state == "PENDING" else made["created_at"]
            made |= {"state": state, "submitted_at": submitted, "commit_id": commit or self.head(1)}
            self.reviews.append(made)
            return int(made["id"])

    def end(self, *, merged: bool) -> None:
        """Merge or close the first pull request."""
        self.pulls[0] |= {"state": "closed", "merged": merged, "updated_at": self._time()}

    def texts(self, login: str = BOT) -> list[str]:
        """What somebody has said, in order, on lines or below."""
        everything = [*self.comments, *self.inline]
        found = [each for each in everything if each["user"]["login"] == login]
        return [each["body"] for each in sorted(found, key=lambda each: int(each["id"]))]

    def head(self, number: int) -> str:
        """What a pull request's branch is at."""
        branch = self.pulls[number - 1]["head"]["ref"]
        return self.commit(branch) or self.pulls[number - 1]["head"]["sha"]

    def commit(self, branch: str) -> str:
        """What a branch of the bare repository is at; "" where there is none."""
        words = ["git", "rev-parse", "--verify", "--quiet", f"refs/heads/{branch}"]
        done = subprocess.run(words, cwd=self.bare, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    # What the server does

    def answer(self, request: Request, query: dict[str, str]) -> Answer:
        path = request.path
        for method, pattern, call in self._routes():
            if request.method == method and (found := re.fullmatch(pattern, path)):
                return call(request, query, *found.groups())
        return 404, _error("Not Found")

    def _routes(self) -> list[tuple[str, str, Callable[..., Answer]]]:
        repository = f"/repos/{NAME}"
        return [
            ("GET", "/user", lambda *_: self._me()),
            ("GET", repository, lambda *_: (200, self._repository())),
            ("GET", f"{repository}/branches/(.+)", self._branch),
            ("GET", f"{repository}/pulls", self._list_pulls),
            ("POST", f"{repository}/pulls", self._open),
            ("GET", rf"{repository}/pulls/(\d+)", lambda _, __, n: (200, self._pull(int(n)))),
            ("GET", rf"{repository}/issues/(\d+)/comments", lambda *_: (200, self.comments)),
            ("POST", rf"{repository}/issues/(\d+)/comments", self._comment_on),
            ("GET", rf"{repository}/pulls/(\d+)/comments", lambda *_: (200, self.inline)),
            ("POST", rf"{repository}/pulls/(\d+)/comments/(\d+)/replies", self._reply),
            ("GET", rf"{repository}/pulls/(\d+)/reviews", lambda *_: (200, self.reviews)),
        ]

    def _me(self) -> Answer:
        if self.login_is_hidden:
            return 403, _error("Resource not accessible by integration")
        return 200, self._user(BOT)

    def _repository(self) -> dict[str, Any]:
        owner = NAME.partition("/")[0]
        return {
            "id": 1,
            "name": NAME.partition("/")[2],
            "full_name": NAME,
            "owner": self._user(owner, "Organization"),
            "default_branch": self.default_branch,
            "url": f"{self.url}/repos/{NAME}",
            "html_url": f"https://github.test/{NAME}",
        }

    def _branch(self, _: Request, __: dict[str, str], name: str) -> Answer:
        commit = self.commit(name)
        if not commit:
            return 404, _error("Branch not found")
        return 200, {"name": name, "commit": {"sha": commit}, "protected": name in self.protected}

    def _list_pulls(self, _: Request, query: dict[str, str]) -> Answer:
        found = [self._pull(each["number"]) for each in self.pulls if each["state"] == "open"]
        if head := query.get("head"):
            found = [each for each in found if each["head"]["label"] == head]
        return 200, found

    def _open(self, request: Request, _: dict[str, str]) -> Answer:
        head = request.body["head"]
        if any(each["head"]["ref"] == head and each["state"] == "open" for each in self.pulls):
            return 422, _error(
                "Validation Failed", f"A pull request already exists for acme:{head}."
            )
        if not self.commit(head):
            return 422, _error("Validation Failed", "head is invalid")
        number, owner = len(self.pulls) + 1, self._user("acme", "Organization")
        self.pulls.append(
            {
                "id": number,
                "number": number,
                "state": "open",
                "merged": False,
                "draft": request.body.get("draft", False),
                "title": request.body["title"],
                "body": request.body["body"],
                "user": self._user(BOT),
                "author_association": "COLLABORATOR",
                "head": {"label": f"acme:{head}", "ref": head, "sha": "", "user": owner},
                "base": {
                    "label": f"acme:{request.body['base']}",
                    "ref": request.body["base"],
                    "user": owner,
                },
                "created_at": self._time(),
                "updated_at": self._time(),
                "url": f"{self.url}/repos/{NAME}/pulls/{number}",
                "issue_url": f"{self.url}/repos/{NAME}/issues/{number}",
                "html_url": f"https://github.test/{NAME}/pull/{number}",
            }
        )
        return 201, self._pull(number)

    def _pull(self, number: int) -> dict[str, Any]:
        pull = self.pulls[number - 1]
        return pull | {"head": pull["head"] | {"sha": self.head(number)}}

    def _comment_on(self, request: Request, _: dict[str, str], number: str) -> Answer:
        if len(request.body["body"]) > MOST:
            return 422, _error(
                "Validation Failed", "Body is too long (maximum is 65536 characters)"
            )
        self.say(BOT, request.body["body"], "COLLABORATOR")
        return 201, self.comments[-1]

    def _reply(self, request: Request, _: dict[str, str], number: str, thread: str) -> Answer:
        if len(request.body["body"]) > MOST:
            return 422, _error(
                "Validation Failed", "Body is too long (maximum is 65536 characters)"
            )
        known = [each for each in self.inline if each["id"] == int(thread)]
        if not known or known[0]["in_reply_to_id"]:
            return 404, _error("Not Found")
        path, line = known[0]["path"], known[0]["line"]
        self.say_inline(BOT, request.body["body"], path, line, "COLLABORATOR", thread=int(thread))
        return 201, self.inline[-1]

    def _comment(self, kind: str, login: str, body: str, association: str) -> dict[str, Any]:
        made = self._time()
        number = 1000 + self.clock
        return {
            "id": number,
            "node_id": f"IC_{number}",
            "user": self._user(login),
            "body": body,
            "author_association": association,
            "created_at": made,
            "updated_at": made,
            "url": f"{self.url}/repos/{NAME}/{kind}/{number}",
            "html_url": f"https://github.test/{NAME}/pull/1#comment-{number}",
        }

    def _user(self, login: str, kind: str = "User") -> dict[str, Any]:
        kind = "Bot" if login.endswith("[bot]") else kind
        return {"login": login, "id": 7, "type": kind, "url": f"{self.url}/users/{login}"}

    def _time(self) -> str:
        self.clock += 1
        return (
            f"2026-01-01T{self.clock // 3600:02}:{self.clock // 60 % 60:02}:{self.clock % 60:02}Z"
        )

    def fault_of(self, request: Request) -> Fault | None:
        for fault in self.faults:
            if fault.method != request.method or not re.search(fault.path, request.path):
                continue
            if fault.skip:
                fault.skip -= 1
            elif fault.times:
                fault.times -= 1
                return fault
        return None


def _error(message: str, detail: str = "") -> dict[str, Any]:
    errors = [{"resource": "PullRequest", "code": "custom", "message": detail}] if detail else []
    return {"message": message, "errors": errors, "documentation_url": "https://docs.github.com"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: GitHub

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, *_: Any) -> None:
        """The tests' output stays clean."""

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        request = Request(self.command, parts.path, body, self.headers.get("Authorization", ""))
        with self.hub.lock:
            self.hub.requests.append(request)
            if self.hub.before(request):
                self._fail(Fault("", ""))
                return
            fault = self.hub.fault_of(request)
            if fault is not None and not fault.after:
                self._fail(fault)
                return
            status, found = self._allowed(request, query)
            self.hub.after(request)
            if fault is not None:
                self._fail(fault)
                return
            self._reply(status, found, query, parts.path)

    def _allowed(self, request: Request, query: dict[str, str]) -> Answer:
        if request.authorization.split()[-1:] != [TOKEN]:
            return 401, _error("Bad credentials")
        return self.hub.answer(request, query)

    def _fail(self, fault: Fault) -> None:
        if fault.status:
            self._send(fault.status, _error(fault.message), fault.headers)
        else:
            self.close_connection = True
            self.connection.close()

    def _reply(self, status: int, found: Any, query: dict[str, str], path: str) -> None:
        headers = {}
        if isinstance(found, list):
            size, page = int(query.get("per_page", 30)), int(query.get("page", 1))
            if len(found) > page * size:
                address = f"{self.hub.url}{path}?per_page={size}&page={page + 1}"
                headers["Link"] = f'<{address}>; rel="next"'
            found = found[(page - 1) * size : page * size]
        tag = f'W/"{hashlib.sha256(json.dumps(found).encode()).hexdigest()[:20]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(304, None, {"ETag": tag})
        else:
            self._send(status, found, {**headers, "ETag": tag})

    def _send(self, status: int, found: Any, headers: dict[str, str]) -> None:
        text = b"" if found is None else json.dumps(found).encode()
        self.send_response(status)
        usual = {
            "X-RateLimit-Limit": "5000",
            "X-RateLimit-Remaining": "4999",
            "X-RateLimit-Reset": "2000000000",
        }
        for name, value in (usual | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error. (To show one parses Python, in Python 3.11 in no two
        threads at once.)
        """
        if not isinstance(sys.exc_info()[1], ConnectionError | ValueError):
            super().handle_error(request, client_address)


@contextmanager
def serving(bare: Path) -> Iterator[GitHub]:
    """Serve a bare repository's pull requests at 127.0.0.1."""
    hub = GitHub(bare)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
