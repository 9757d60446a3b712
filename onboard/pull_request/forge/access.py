"""With which token, and at which address, GitHub is spoken to.

The token is taken out of the environment as it is read: no program that is started later is given
it. It is written nowhere.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from onboard.errors import UsageError

PUBLIC = "github.com"
_OF_PUBLIC = ("GH_TOKEN", "GITHUB_TOKEN")
_OF_OTHERS = ("GH_ENTERPRISE_TOKEN", "GITHUB_ENTERPRISE_TOKEN")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GH_SECONDS = 15


@dataclass(frozen=True)
class Access:
    """Where GitHub's API is, and who asks."""

    host: str
    """Of repositories: github.com, or a company's own."""
    api: str
    token: str = field(repr=False)

    def hidden(self, text: str) -> str:
        """Return a text without the token, wherever it came from."""
        return text.replace(self.token, "[hidden]")


def find_access(remote_host: str, environment: MutableMapping[str, str] | None = None) -> Access:
    """Return the access to a remote's host: `GITHUB_API_URL` and `GH_HOST` come first.

    The token is one of the environment, as the GitHub CLI reads it, or `gh auth token`'s. Those for
    github.com go to another host only where the user has named that host; a remote's address, which
    may have come with a clone, names none.

    Raises:
        UsageError: there is no token, or it would go over the network in the clear.
    """
    variables = os.environ if environment is None else environment
    host = variables.get("GH_HOST") or remote_host or PUBLIC
    api = variables.get("GITHUB_API_URL") or _api_of(host)
    _require_safe(api)
    named = bool(variables.get("GH_HOST") or variables.get("GITHUB_API_URL"))
    found = _taken(variables, (*_OF_PUBLIC, *_OF_OTHERS))
    names = _names(host, named)
    token = next((found[name] for name in names if name in found), "") or _of_gh(host)
    if not token:
        raise UsageError(
            f"there is no token for {host}", hint=f"Set {names[0]}, or run gh auth login"
        )
    return Access(host, api.rstrip("/"), token)


def _api_of(host: str) -> str:
    return "https://api.github.com" if host == PUBLIC else f"https://{host}/api/v3"


def _require_safe(api: str) -> None:
    parts = urlsplit(api)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise UsageError(
            f"GitHub's address {api} is not https", hint="Only this machine may be asked without"
        )


def _names(host: str, named: bool) -> tuple[str, ...]:
    """Return the variables that may hold a host's token, the first one first."""
    if host == PUBLIC or host.endswith(".ghe.com"):
        return _OF_PUBLIC
    return (*_OF_OTHERS, *_OF_PUBLIC) if named else _OF_OTHERS


def _taken(variables: MutableMapping[str, str], names: Iterable[str]) -> dict[str, str]:
    found = {name: variables.pop(name, "").strip() for name in names}
    return {name: value for name, value in found.items() if value}


def _of_gh(host: str) -> str:
    """Return what the GitHub CLI has stored, in `GH_CONFIG_DIR` where that is set."""
    try:
        done = subprocess.run(
            ["gh", "auth", "token", "--hostname", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
