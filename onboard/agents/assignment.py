"""A role's run: it is asked, what it answers is looked at, and it is asked again with the reason why
that was not taken, within its limits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from onboard.agents.answers import Answer
from onboard.agents.back_ends.command import CommandBackEnd
from onboard.agents.back_ends.endpoint import EndpointBackEnd
from onboard.agents.refused import RefusedError
from onboard.agents.role_runs import Clock, Records, RoleRun, Transcript, hidden
from onboard.agents.role_settings import Builtin, Command, OpenAI
from onboard.agents.roles import Role, Task
from onboard.agents.workspace import BackEnd, Reply, Workspace
from onboard.errors import OnboardError

T = TypeVar("T")
A = TypeVar("A", bound=Answer)
_TOLD = 2000
"""Letters of a refusal that an agent is told."""


@dataclass
class Assignment:
    """A role with its task, who plays it, and what it has before it."""

    role: Role
    task: Task
    settings: Builtin | Command | OpenAI
    workspace: Workspace
    records: Records
    unsandboxed: bool = False
    tell: Callable[[str], None] = lambda _: None
    """Hears what is waited for."""
    root: Path | None = None
    """Whose templates come first."""

    def open(self) -> RoleRun:
        """Return the record of this run: an earlier one with the same inputs, or a new one."""
        inputs = [
            self.task.model_dump(mode="json"),
            self.workspace.files,
            sorted(self.workspace.editable),
            self.settings.model_dump(mode="json"),
        ]
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        run = RoleRun(
            role=self.role.name,
            back_end=self.settings.kind,
            about=self.task.about[:300],
            input_hash=digest,
        )
        return self.records.open(run)

    def answered(self, read: Callable[[Reply], A], say: Callable[[A], str]) -> A:
        """Return the answer of a role that changes no file; a recorded one is not asked for again.

        Args:
            read: makes an answer of a reply, or raises `RefusedError`.
            say: what came of it, in a line.

        Raises:
            OnboardError: no answer was taken within the limits.
        """
        run = self.open()

        def accept(reply: Reply) -> A:
            answer = read(reply)
            run.answer, run.after = answer.model_dump(), say(answer)
            return answer

        if run.status == "done":
            with suppress(RefusedError):
                return accept(Reply(json.dumps(run.answer)))
            run.status = "running"
        return self.carry_out(run, accept)

    def carry_out(self, run: RoleRun, accept: Callable[[Reply], T]) -> T:
        """Ask until `accept` takes an answer; return what it makes of it.

        Raises:
            OnboardError: none was taken within the limits; with the last reason.
        """
        transcript = Transcript(self.records.folder / run.transcript, self._secrets())
        while run.status == "running" and run.attempts < self.settings.attempts:
            if over := self._over(run):
                run.refusals.append(over)
                break
            run.attempts += 1
            try:
                taken = accept(self._ask(run, transcript))
            except RefusedError as error:
                self._refuse(run, error, transcript)
            else:
                self._end(run, "done", transcript)
                return taken
        if run.status == "running":
            self._end(run, "failed", transcript)
        last = run.refusals[-1] if run.refusals else "no answer"
        raise OnboardError(
            f"the {run.role} ({run.back_end}) had no answer that holds in {run.attempts} attempts: {last}",
            hint=f"See {self.records.folder / run.transcript}",
        )

    def _ask(self, run: RoleRun, transcript: Transcript) -> Reply:
        prompt = self.role.brief(self.task, run.refusals, self.root)
        transcript("asked", {"role": run.role, "attempt": run.attempts, "prompt": prompt})
        run.waits_for = f"{run.back_end}, attempt {run.attempts} of {self.settings.attempts}"
        self.records.save()
        self.tell(f"{run.role} waits for {run.waits_for}")
        with Clock(run):
            reply = self._back_end().ask(prompt, self.workspace, transcript)
        self._count(run, reply)
        run.waits_for = "the tests"
        self.records.save()
        self.tell(f"{run.role} waits for the tests")
        return reply

    def _back_end(self) -> BackEnd:
        match self.settings:
            case Command() as settings:
                return CommandBackEnd(settings, self.unsandboxed)
            case OpenAI() as settings:
                return EndpointBackEnd(settings)
        raise AssertionError("the rules are no back end to ask")

    def _count(self, run: RoleRun, reply: Reply) -> None:
        run.tokens += reply.usage.tokens
        run.cost = round(run.cost + reply.usage.cost, 6)
        run.estimated = run.estimated or reply.usage.estimated

    def _refuse(self, run: RoleRun, error: RefusedError, transcript: Transcript) -> None:
        self._count(run, Reply("", usage=error.usage))
        reason = hidden(str(error), self._secrets())[:_TOLD]
        run.refusals.append(reason)
        transcript("refused", {"attempt": run.attempts, "reason": reason})
        self.records.save()

    def _end(self, run: RoleRun, status: str, transcript: Transcript) -> None:
        run.status, run.waits_for = ("done" if status == "done" else "failed"), ""
        transcript(status, {"tokens": run.tokens, "cost": run.cost, "seconds": run.seconds})
        self.records.save()

    def _over(self, run: RoleRun) -> str:
        """Return which bound of all attempts is reached."""
        own = self.settings
        if own.tokens is not None and run.tokens >= own.tokens:
            return f"it has taken {run.tokens:,} tokens, of {own.tokens:,} at most"
        if own.cost is not None and run.cost > own.cost:
            return f"it has cost {run.cost:.2f} dollars, of {own.cost:.2f} at most"
        return ""

    def _secrets(self) -> list[str]:
        """Return what must not be written down: the key, and the variables that are handed over."""
        own = self.settings
        names = [own.key_variable] if isinstance(own, OpenAI) else []
        names += own.environment if isinstance(own, Command) else []
        return [os.environ[name] for name in names if name in os.environ]
