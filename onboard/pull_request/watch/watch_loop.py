"""Watches a pull request: what was said is read, answered once, and at last it ends.

Each thing that somebody said is noted before it is acted on and when it is done with. After a kill
the next watcher takes up what was begun, and looks for our mark on GitHub before it posts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from onboard.errors import OnboardError
from onboard.pull_request.cycle import Tell
from onboard.pull_request.forge.github_api import Pull
from onboard.pull_request.forge.patience import LaterError, UnreachableError
from onboard.pull_request.forge.posts import answered, is_agents, mark_of, post
from onboard.pull_request.forge.remarks import Said, may_ask
from onboard.pull_request.pull_journal import Change, Handled, PullJournal, now
from onboard.pull_request.pushed_proof import CommitProof
from onboard.pull_request.watch.hands import Hands
from onboard.pull_request.watch.speech import first_words, kind_of, kinds_of
from onboard.render import fenced, inline

QUIET = 7200.0
"""Seconds without activity after which the user is told."""

_NO_EVIDENCE = "What was found and measured says nothing of this. The author has been told."


@dataclass
class Watch:
    """One watcher's view of a pull request."""

    pull: Pull
    work_dir: Path
    hands: Hands
    trusted: frozenset[str]
    """Logins, in lower case, that may ask beside those whom GitHub names."""
    tell: Tell
    acting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Holds the lock under which something is pushed or posted."""
    log: Callable[..., None] = lambda *_, **__: None
    """`Worklog.append`: what was done, once."""
    quiet: float = QUIET
    clock: Callable[[], float] = time.monotonic
    journal: PullJournal = field(init=False)
    last: float = field(init=False)
    """When something happened, or the user was told that nothing did."""

    def __post_init__(self) -> None:
        self.last = self.clock()
        self._load()

    def until_ended(self, interval: float, sleep: Callable[[float], None] = time.sleep) -> str:
        """Poll until it has ended; return why.

        What is in the way for now is tried again at the next poll.
        """
        while True:
            try:
                if ended := self.poll():
                    return ended
            except LaterError as error:
                hint = f" ({error.hint})" if error.hint else ""
                self.tell(f"{error.message}{hint}: again in {interval:.0f} s")
            self._tell_if_quiet()
            sleep(interval)

    def poll(self) -> str:
        """Handle what is new; return why the pull request has ended, "" while it is open."""
        with self.acting():
            self._load()  # another command may have pushed since
            return self._poll()

    def _load(self) -> None:
        journal = PullJournal.load(self.work_dir)
        assert journal is not None, "a watcher begins with a journal"
        self.journal = journal

    def _save(self) -> None:
        self.journal.save(self.work_dir)

    def _poll(self) -> str:
        self.pull.refresh()
        everything = self.pull.said()
        done = self._done(everything)
        later: LaterError | None = None
        for said in everything:
            if self.pull.is_ours(said) or said.key in done:
                continue
            try:
                self._handle(said)
            except UnreachableError:
                raise
            except LaterError as error:  # what else was said may be handled all the same
                later = error
        if later is not None:
            raise later
        self.pull.refresh()  # what was pushed is not approved yet
        return self._end(self._ended(everything))

    def _done(self, everything: list[Said]) -> set[str]:
        """Return what was dealt with: as the journal says, or as our posts say that are there."""
        ours = [mark_of(said.body) for said in everything if self.pull.is_ours(said)]
        found = answered(ours)
        for key in found & self.journal.handled.keys():
            self._finish(key)
        finished = {key for key, item in self.journal.handled.items() if item.status == "done"}
        return found | finished

    def _handle(self, said: Said) -> None:
        item = self._begin(said)
        match item.kind:
            case "question":
                self._answer(said)
            case "change request":
                self._change(said, item)
            case "untrusted":
                self._note(said, "not acted on: its author is not on the list")
            case "noise" if said.body.strip():
                self._note(said, "nothing that could be acted on was read")
            case _:
                self._note(said, "noted")

    def _begin(self, said: Said) -> Handled:
        """Note what is to be handled before anything is done for it."""
        known = self.journal.handled.get(said.key)
        if known is not None:
            self.tell(f"takes up {known.kind} of {known.author}: {known.about}")
            return known
        kind = kind_of(said) if self._may_ask(said) else "untrusted"
        about = first_words(said.body or said.verdict)
        item = Handled(kind=kind, author=said.author, about=about, url=said.url)
        self.journal.handled[said.key] = item
        self.journal.last_activity = now()
        self.last = self.clock()
        self._save()
        self.tell(f"{kind} of {said.author}: {about}")
        return item

    def _may_ask(self, said: Said) -> bool:
        """Whether somebody who may ask said it, and no other program: two would talk for ever."""
        return may_ask(said, self.trusted) and not is_agents(said.body)

    def _settle(
        self, said: Said, text: str, outcome: str, waits_for: Literal["", "you"] = ""
    ) -> None:
        """Reply, where it was said (in the thread of lines, or below), and be done with it.

        What came of it is noted before: a run that is killed has posted it, or posts it.
        """
        item = self.journal.handled[said.key]
        item.outcome, item.waits_for = outcome, waits_for
        self._save()
        head = "" if said.place == "inline" else f"On {said.url}:\n\n"
        posts = post(f"{head}{text}", f"answers {said.key}")
        self.pull.put(posts, said.thread if said.place == "inline" else 0)
        self._finish(said.key)

    def _note(self, said: Said, outcome: str) -> None:
        self.journal.handled[said.key].outcome = outcome
        self._finish(said.key)

    def _finish(self, key: str) -> None:
        item = self.journal.handled[key]
        if item.status == "done":
            return
        item.status = "done"
        self._log(key, item)
        self._save()
        if item.waits_for:
            self.tell(f"waits for you: {item.kind} of {item.author}, {item.outcome} ({item.url})")

    def _log(self, key: str, item: Handled) -> None:
        title = f"pull request: {item.kind} of {item.author}"
        lines = [f"- Said: {item.about} ({item.url})", f"- Outcome: {item.outcome}"]
        known = item.model_dump(mode="json", exclude={"change"})
        self.log(title, "\n".join(lines), key=f"pull request {self.pull.number} {key}", **known)

    def _answer(self, said: Said) -> None:
        if found := self.hands.answer(said):
            self._settle(said, found, "answered from the evidence")
        else:
            self._settle(said, _NO_EVIDENCE, "the evidence has no answer", "you")

    def _change(self, said: Said, item: Handled) -> None:
        try:
            if item.change is None:
                item.change = self.hands.propose(said)
                self._save()
            self.hands.commit(item.change)
        except LaterError:
            raise
        except OnboardError as error:
            text = f"This change was not made: {inline(error.message)}. The author has been told."
            self._settle(said, self._with_answer(said, text), f"not made: {error.message}", "you")
            return
        about = f"A change that {said.author} asks for ({said.place} {said.id})."
        proof = self.hands.push(self.pull, self.journal, about)
        text = self._with_answer(said, changed_text(item.change, proof))
        waits_for: Literal["", "you"] = "" if proof.passed else "you"
        self._settle(said, text, f"changed in {proof.commit[:12]}", waits_for)

    def _with_answer(self, said: Said, text: str) -> str:
        """Return a reply to a request with the answer to what was asked beside it."""
        if "question" not in kinds_of(said):
            return text
        return f"{text}\n\n{self.hands.answer(said) or _NO_EVIDENCE}"

    def _ended(self, everything: list[Said]) -> str:
        if self.pull.ended:
            return self.pull.ended
        kinds = self.journal.handled
        for said in everything:
            is_end = said.key in kinds and kinds[said.key].kind == "end"
            if is_end and self._is_latest(said, everything):
                return f"{said.author} says that no more changes are wanted"
        if self._objects(everything):
            return ""
        return self._approved(everything)

    def _objects(self, everything: list[Said]) -> bool:
        """Whether the latest verdict of somebody who may ask is that changes are needed."""
        return "CHANGES_REQUESTED" in self._verdicts(everything).values()

    def _verdicts(self, everything: list[Said]) -> dict[str, str]:
        decided = ("APPROVED", "CHANGES_REQUESTED", "DISMISSED")
        return {
            said.author: said.verdict
            for said in everything
            if said.verdict in decided and self._may_ask(said)
        }

    def _approved(self, everything: list[Said]) -> str:
        """Return who has approved what is there now; "" where nobody has."""
        latest = self._verdicts(everything)
        for said in everything:
            item = self.journal.handled.get(said.key)
            if item is None or not self._may_ask(said):
                continue
            if said.verdict == "APPROVED" and latest[said.author] == "APPROVED":
                if said.commit == self.pull.head_commit:
                    return f"approved by {said.author}"
            elif not said.verdict and item.kind == "approval" and self._holds(said, everything):
                return f"approved by {said.author}"
        return ""

    def _holds(self, said: Said, everything: list[Said]) -> bool:
        """Whether a comment's approval is of what is there now: nothing was asked or pushed since."""
        later = everything[everything.index(said) + 1 :]
        ours = (mark_of(each.body) for each in later if self.pull.is_ours(each))
        pushed = any(mark.startswith("update ") for mark in ours)
        return not pushed and self._is_latest(said, everything)

    def _is_latest(self, said: Said, everything: list[Said]) -> bool:
        """Whether nothing was asked after something was said."""
        later = everything[everything.index(said) + 1 :]
        kinds = (self.journal.handled.get(each.key) for each in later)
        return not any(item and item.kind in ("question", "change request") for item in kinds)

    def _end(self, ended: str) -> str:
        if self.journal.ended != ended:
            self.journal.ended = ended
            self._save()
        return ended

    def _tell_if_quiet(self) -> None:
        if self.clock() - self.last >= self.quiet:
            hours = (self.clock() - self.last) / 3600
            self.last = self.clock()
            self.tell(
                f"{hours:.1f} h without activity on {self.pull.url}; still watching, an interrupt ends it"
            )


def changed_text(change: Change, proof: CommitProof) -> str:
    """Return the answer to a change request that was carried out."""
    state = "passed" if proof.passed else "FAILED"
    return (
        f"Changed in {proof.commit}.\n\n{fenced(change.diff, 'diff')}\n\n"
        f"- Before: {inline(change.before)}\n- After: {inline(change.after)}\n"
        f"- On the pushed commit: {state}; {inline(proof.summary)} (logs above)"
    )
