"""Who plays which role, and within what limits: the `agents:` of a run's settings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from onboard.config import StrictModel, suggest
from onboard.errors import UsageError
from onboard.untrusted.bounds import YAML_BYTES, read_text

RoleName = Literal["porter", "repairer", "reviewer", "runner"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Limits(StrictModel):
    """How much one run of a role may take."""

    attempts: int = Field(default=3, ge=1, le=20)
    """Answers that are looked at before the role has failed."""
    seconds: float = Field(default=600.0, gt=0, le=86_400)
    """Of one attempt."""
    output_bytes: int = Field(default=2**20, ge=1, le=2**26)
    """Of one attempt: what is said and what is written."""
    tokens: int | None = Field(default=None, ge=1)
    """Of all attempts; None: no bound."""
    cost: float | None = Field(default=None, ge=0)
    """Of all attempts, in US dollars; None: no bound."""


class Builtin(Limits):
    """The rules of this package; needs nothing."""

    kind: Literal["builtin"] = "builtin"


class Command(Limits):
    """A command line that works on a copy of the files, behind walls."""

    kind: Literal["command"] = "command"
    command: list[str] = Field(min_length=1)
    """The program and its words."""
    prompt: Literal["stdin", "file"] = "stdin"
    """Where it reads what is asked: its standard input, or `brief.md` in its folder."""
    network: bool = False
    """It needs the network for its own endpoint; then it has all of it, and fewer walls."""
    reads: list[Path] = Field(default_factory=list)
    """Folders and files besides the system's that it has to read: its program, its settings."""
    environment: list[str] = Field(default_factory=list)
    """Names of variables that are handed to it; no other that may hold a secret is."""


class Prices(StrictModel):
    """US dollars for a million tokens."""

    input: float = Field(default=0.0, ge=0)
    output: float = Field(default=0.0, ge=0)


class OpenAI(Limits):
    """An endpoint that speaks OpenAI's chat completions, with tools that work on copies in memory."""

    kind: Literal["openai"] = "openai"
    base_url: str
    """Up to `/v1`."""
    model: str
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that has the key; none is sent where it is not set."""
    prices: Prices = Field(default_factory=Prices)
    steps: int = Field(default=30, ge=1, le=1000)
    """Requests of one attempt."""
    retries: int = Field(default=5, ge=0, le=20)
    """Of a request that the endpoint is too busy for, or that is cut."""
    retry_seconds: float = Field(default=1.0, gt=0, le=60)
    """Before the first retry; twice as long before each later one."""

    @field_validator("base_url")
    @classmethod
    def _no_key_in_the_clear(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise ValueError("it is https, or http on this machine")
        return value.rstrip("/")


BackEndSettings = Annotated[Builtin | Command | OpenAI, Field(discriminator="kind")]


class AgentsSettings(StrictModel):
    """The back end of each role."""

    porter: BackEndSettings = Field(default_factory=Builtin)
    repairer: BackEndSettings = Field(default_factory=Builtin)
    reviewer: BackEndSettings = Field(default_factory=Builtin)
    runner: BackEndSettings = Field(default_factory=Builtin)

    def of(self, role: RoleName) -> Builtin | Command | OpenAI:
        """Return the settings of a role."""
        found: Builtin | Command | OpenAI = getattr(self, role)
        return found


def load_settings(path: Path | None, flags: Sequence[str] = ()) -> AgentsSettings:
    """Return the settings of a YAML file (its `agents:`), with those of `--agent` over them.

    A file is read only where the user names it: one that came with a root could name any command.

    Raises:
        UsageError: the file or a flag is not as it has to be.
    """
    values: dict[str, Any] = {} if path is None else _from_file(path)
    for flag in flags:
        role, _, text = flag.partition("=")
        if role not in ROLES:
            raise UsageError(f"--agent {flag!r} names no role", hint=suggest(role, ROLES))
        values[role] = _from_flag(text, flag)
    try:
        return AgentsSettings.model_validate(
            {role: _with_kind(value) for role, value in values.items()}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"agents.{place}: {first['msg']}", hint="See docs/agents.md") from None


def _with_kind(value: Any) -> Any:
    """A bare word is a kind: `reviewer: builtin`."""
    return {"kind": value} if isinstance(value, str) else value


def _from_file(path: Path) -> dict[str, Any]:
    from onboard.untrusted.yaml_text import load_yaml

    try:
        found = load_yaml(read_text(path, YAML_BYTES), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error})") from error
    agents = found.get("agents") if isinstance(found, Mapping) else None
    if not isinstance(agents, Mapping):
        raise UsageError(f"{path} has no agents:", hint="See docs/agents.md")
    return dict(agents)


def _from_flag(text: str, flag: str) -> dict[str, Any]:
    """Read `builtin`, `command:WORDS` or `openai:MODEL@URL`."""
    kind, _, rest = text.partition(":")
    if kind == "builtin" and not rest:
        return {"kind": kind}
    if kind == "command" and rest:
        return {"kind": kind, "command": shlex.split(rest)}
    model, _, url = rest.rpartition("@")
    if kind == "openai" and model:
        return {"kind": kind, "model": model, "base_url": url}
    raise UsageError(
        f"--agent {flag!r} is no back end",
        hint="Write ROLE=builtin, ROLE='command:PROGRAM WORDS' or ROLE=openai:MODEL@https://HOST/v1",
    )
