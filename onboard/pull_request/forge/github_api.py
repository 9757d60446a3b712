"""The calls of GitHub's REST API that a pull request needs, through PyGithub.

PyGithub's own retries are off: they would send a comment again of which only the answer was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from github import Auth, Github, GithubException
from github.PullRequest import PullRequest
from github.Repository import Repository

from onboard.pull_request.forge.access import Access
from onboard.pull_request.forge.patience import ATTEMPTS, Tell, patiently
from onboard.pull_request.forge.posts import Post, is_agents, mark_of
from onboard.pull_request.forge.remarks import Said

T = TypeVar("T")
_SECONDS = 30


@dataclass
class Forge:
    """A repository on GitHub, spoken to with patience."""

    access: Access
    name: str
    """OWNER/NAME."""
    tell: Tell = lambda _: None
    attempts: int = ATTEMPTS
    pause: float = 1.0
    """Seconds between two writes."""

    @cached_property
    def _github(self) -> Github:
        return Github(
            auth=Auth.Token(self.access.token),
            base_url=self.access.api,
            timeout=_SECONDS,
            per_page=100,
            retry=None,
            user_agent="onboard",
            seconds_between_requests=None,
            seconds_between_writes=self.pause,
        )

    @cached_property
    def _repository(self) -> Repository:
        return self.ask(lambda: self._github.get_repo(self.name))

    def ask(self, call: Callable[[], T]) -> T:
        """Return what a call returns; see `patiently`."""
        return patiently(call, self.tell, attempts=self.attempts)

    @property
    def default_branch(self) -> str:
        """The branch that pull requests are for unless they say otherwise."""
        return self._repository.default_branch

    @property
    def owner(self) -> str:
        """The login of the repository's owner."""
        return self.name.partition("/")[0]

    def is_protected(self, branch: str) -> bool:
        """Whether a branch is there and protected."""

        def call() -> bool:
            try:
                return bool(self._repository.get_branch(branch).protected)
            except GithubException as error:
                if error.status == 404:
                    return False
                raise

        return self.ask(call)

    def open_pull(self, head: str) -> Pull | None:
        """Return the open pull request of a head (OWNER:BRANCH), if there is one."""
        found: list[PullRequest] = self.ask(
            lambda: list(self._repository.get_pulls(state="open", head=head))
        )
        # A server may leave out the filter
        pulls = [pull for pull in found if _head_of(pull) == head]
        return Pull(self, pulls[0]) if pulls else None

    def pull(self, number: int) -> Pull:
        """Return a pull request by its number."""
        return Pull(self, self.ask(lambda: self._repository.get_pull(number)))

    def create(self, head: str, target: str, title: str, body: str, *, draft: bool) -> Pull:
        """Open a pull request, or return the one that an attempt whose answer was lost has opened."""
        tried = False

        def call() -> PullRequest:
            nonlocal tried
            if tried and (known := self.open_pull(head)):
                return known.pull
            tried = True
            own = head.removeprefix(f"{self.owner}:")
            return self._repository.create_pull(
                base=target, head=own, title=title, body=body, draft=draft
            )

        return Pull(self, self.ask(call))

    @cached_property
    def login(self) -> str:
        """Who the token's owner is; "" for one that is not told, as an app's."""

        def call() -> str:
            try:
                return self._github.get_user().login
            except GithubException as error:
                if error.status == 403 and "not accessible" in str(error.data):
                    return ""
                raise

        return self.ask(call)


def _head_of(pull: PullRequest) -> str:
    return f"{pull.head.user.login if pull.head.user else ''}:{pull.head.ref}"


@dataclass
class Pull:
    """A pull request on GitHub."""

    forge: Forge
    pull: PullRequest

    @property
    def number(self) -> int:
        """Its number."""
        return self.pull.number

    @property
    def url(self) -> str:
        """Its page."""
        return self.pull.html_url

    @property
    def head_commit(self) -> str:
        """What its branch is at."""
        return self.pull.head.sha

    @property
    def first_mark(self) -> str:
        """The mark of its own text."""
        return mark_of(self.pull.body or "")

    @property
    def ended(self) -> str:
        """Why it has: "merged" or "closed"; "" while it is open."""
        if self.pull.merged:
            return "merged"
        return "closed" if self.pull.state == "closed" else ""

    @property
    def me(self) -> str:
        """The login that our posts have."""
        return self.forge.login or self.pull.user.login

    def refresh(self) -> None:
        """Ask for its state; what has not changed costs no request of the limit (ETag)."""
        self.forge.ask(self.pull.update)

    def said(self) -> list[Said]:
        """Return all that was said, in the order of time, our own posts among it."""
        pull, ask = self.pull, self.forge.ask
        comments = ask(lambda: [_of_comment(each) for each in pull.get_issue_comments()])
        inline = ask(lambda: [_of_line(each) for each in pull.get_review_comments()])
        # One that is not sent yet is its author's alone
        reviews = ask(
            lambda: [_of_review(each) for each in pull.get_reviews() if each.submitted_at]
        )
        return sorted([*comments, *inline, *reviews], key=lambda said: (said.at, said.id))

    def is_ours(self, said: Said) -> bool:
        """Whether we have posted it: with our account, and the sign of a program."""
        return said.author == self.me and is_agents(said.body)

    def marks(self) -> set[str]:
        """Return the marks of our posts, as they are now."""
        return {mark for said in self.said() if self.is_ours(said) and (mark := mark_of(said.body))}

    def put(self, posts: Sequence[Post], thread: int = 0) -> None:
        """Post what is not there yet.

        Args:
            posts: in their order.
            thread: the comment on lines that they answer; 0: none.
        """
        for each in posts:
            self.forge.ask(partial(self._put, each, thread))

    def _put(self, one: Post, thread: int) -> None:
        """Post one comment unless it is there: also where only the answer of a try was lost."""
        if one.mark in self.marks():
            return
        body = self.forge.access.hidden(one.body)
        try:
            if thread:
                self.pull.create_review_comment_reply(thread, body)
                return
        except GithubException as error:
            if error.status != 404:  # the thread was deleted
                raise
        self.pull.create_issue_comment(body)


def _author(user: Any) -> tuple[str, bool]:
    """Return a login, and whether it is a program's; a deleted account is called ghost."""
    login = user.login if user is not None else "ghost"
    is_bot = user is not None and (user.type == "Bot" or login.endswith("[bot]"))
    return login, is_bot


def _of_comment(each: Any) -> Said:
    author, is_bot = _author(each.user)
    return Said(
        "comment",
        each.id,
        author,
        each.author_association,
        is_bot,
        each.body or "",
        each.created_at,
        each.html_url,
    )


def _of_line(each: Any) -> Said:
    author, is_bot = _author(each.user)
    line = each.line or 0
    return Said(
        "inline",
        each.id,
        author,
        each.author_association,
        is_bot,
        each.body or "",
        each.created_at,
        each.html_url,
        path=each.path,
        first_line=each.start_line or line,
        line=line,
        quoted=_last_line(each.diff_hunk),
        thread=each.in_reply_to_id or each.id,
    )


def _last_line(hunk: str | None) -> str | None:
    """Return the line that a diff's hunk ends with, as the new file has it; None where it is none."""
    last = (hunk or "").splitlines()[-1:]
    return last[0][1:] if last and last[0][:1] in ("+", " ") else None


def _of_review(each: Any) -> Said:
    author, is_bot = _author(each.user)
    return Said(
        "review",
        each.id,
        author,
        each.author_association,
        is_bot,
        each.body or "",
        each.submitted_at,
        each.html_url,
        verdict=each.state,
        commit=each.commit_id,
    )
