"""Which token goes where, and what may pass."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import requests
from github import GithubException

from onboard.errors import OnboardError, UsageError
from onboard.git import Checkout
from onboard.pull_request.forge.access import find_access
from onboard.pull_request.forge.patience import UnreachableError, patiently, seconds_to_wait
from onboard.pull_request.remote_branch import RemoteBranch, RemoteName, remote_named
from tests.support.pull_requests import git


@pytest.mark.parametrize(
    ("host", "variables", "api", "token"),
    [
        ("github.com", {"GH_TOKEN": "a", "GITHUB_TOKEN": "b"}, "https://api.github.com", "a"),
        ("github.com", {"GITHUB_TOKEN": "b"}, "https://api.github.com", "b"),
        ("git.corp", {"GH_ENTERPRISE_TOKEN": "c"}, "https://git.corp/api/v3", "c"),
        ("github.com", {"GH_HOST": "git.corp", "GH_TOKEN": "a"}, "https://git.corp/api/v3", "a"),
        (
            "x.test",
            {"GITHUB_API_URL": "http://127.0.0.1:9/", "GH_TOKEN": "a"},
            "http://127.0.0.1:9",
            "a",
        ),
    ],
)
def test_the_token_of_the_environment(
    host: str, variables: dict[str, str], api: str, token: str
) -> None:
    left = dict(variables)
    access = find_access(host, left)
    assert (access.api, access.token) == (api, token)
    assert not [name for name in left if name.endswith("TOKEN")]
    assert f"'{token}'" not in repr(access)


@pytest.mark.parametrize(
    ("host", "variables", "said"),
    [
        ("evil.test", {"GH_TOKEN": "a"}, "there is no token for evil.test"),
        ("github.com", {"GH_ENTERPRISE_TOKEN": "c"}, "there is no token for github.com"),
        ("github.com", {"GITHUB_API_URL": "http://evil.test", "GH_TOKEN": "a"}, "is not https"),
    ],
)
def test_a_token_goes_nowhere_else(
    host: str, variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match=said):
        find_access(host, variables)


def test_the_token_of_the_github_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gh = tmp_path / "gh"
    gh.write_text('#!/bin/sh\necho "$GH_CONFIG_DIR $*" >&2\necho "of $GH_CONFIG_DIR for $4"\n')
    gh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("GH_CONFIG_DIR", "there")
    assert find_access("git.corp", {}).token == "of there for git.corp"


@pytest.mark.parametrize(
    ("url", "host", "name", "is_https"),
    [
        ("https://github.com/acme/models.git", "github.com", "acme/models", True),
        ("https://me:secret@github.com/acme/models", "github.com", "acme/models", True),
        ("git@github.com:acme/models.git", "github.com", "acme/models", False),
        ("ssh://git@git.corp:2222/acme/models.git/", "git.corp", "acme/models", False),
    ],
)
def test_where_a_remote_is(tmp_path: Path, url: str, host: str, name: str, is_https: bool) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "remote", "add", "origin", url)
    checkout = Checkout.find(tmp_path)
    assert checkout is not None
    assert remote_named(checkout, "origin") == RemoteName("origin", host, name, is_https)


@pytest.mark.parametrize("url", ["/srv/models.git", "https://me:secret@github.com/a/b/c", "x"])
def test_a_remote_that_is_no_repository_of_github(tmp_path: Path, url: str) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "remote", "add", "origin", url)
    checkout = Checkout.find(tmp_path)
    assert checkout is not None
    with pytest.raises(UsageError, match="no repository of GitHub") as caught:
        remote_named(checkout, "origin")
    assert "secret" not in str(caught.value)


def test_git_gets_the_token_for_its_host_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git asks for credentials as it would of a server that wants them."""
    git(tmp_path, "init", "-q")
    checkout = Checkout.find(tmp_path)
    assert checkout is not None
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    access = find_access("git.corp", {"GH_ENTERPRISE_TOKEN": "s3cret"})
    seen: list[Any] = []

    def run(repo: Any, *words: str) -> str:
        options = [word for word in words if word not in ("fetch", "origin")]
        seen.append((words, dict(repo.git.environment())))
        filled = subprocess.run(
            ["git", *options, "credential", "fill"],
            input="protocol=https\nhost=git.corp\n\n",
            env=os.environ | repo.git.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return filled.stdout

    found = {}
    for host in ("git.corp", "other.test"):
        remote = RemoteName("origin", host, "a/b", True)
        branch = RemoteBranch(checkout, "x", remote, remote, "main", access)
        monkeypatch.setattr(branch, "_run", run)
        found[host] = branch._talk(remote, "fetch", "origin")
    assert "password=s3cret" in found["git.corp"]
    assert "s3cret" not in found["other.test"]
    assert all("s3cret" not in word for words, _ in seen for word in words)
    assert "s3cret" not in str(seen[1][1])


def refusal(status: int, message: str = "", **headers: str) -> GithubException:
    return GithubException(status, {"message": message}, headers)


def test_github_is_waited_for_as_it_says() -> None:
    assert seconds_to_wait(refusal(403, **{"retry-after": "37"}), 1) == 37
    reset = str(int(time.time()) + 100)
    limit = refusal(403, **{"x-ratelimit-remaining": "0", "x-ratelimit-reset": reset})
    assert 95 < seconds_to_wait(limit, 1) <= 101
    assert seconds_to_wait(refusal(403, "You have exceeded a secondary rate limit"), 1) == 60
    assert [seconds_to_wait(refusal(502), attempt) for attempt in (1, 2, 3, 9)] == [1, 2, 4, 60]
    assert seconds_to_wait(refusal(403, **{"retry-after": "9999999"}), 1) < 4000
    assert seconds_to_wait(refusal(403, **{"retry-after": "soon"}), 1) == 60
    assert seconds_to_wait(requests.ConnectionError(), 2) == 2


@pytest.mark.parametrize(
    ("error", "calls", "kind"),
    [
        (refusal(502), 3, UnreachableError),
        (requests.ConnectionError(), 3, UnreachableError),
        (refusal(429), 3, UnreachableError),
        (refusal(403, "Must have push access"), 1, OnboardError),
        (refusal(422, "Validation Failed"), 1, OnboardError),
        (refusal(401, "Bad credentials"), 1, UsageError),
    ],
)
def test_what_may_pass_is_tried_again(error: Exception, calls: int, kind: type[Exception]) -> None:
    made: list[int] = []
    told: list[str] = []

    def call() -> None:
        made.append(1)
        raise error

    with pytest.raises(kind) as caught:
        patiently(call, told.append, attempts=3, sleep=lambda _: None)
    assert type(caught.value) is kind
    assert (len(made), len(told)) == (calls, calls - 1)
