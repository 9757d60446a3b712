"""The branch of a pull request: rebased on its target, pushed, and checked out apart.

The working tree stays as it is, but where the branch itself is checked out.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onboard.errors import OnboardError, UsageError
from onboard.git import Checkout
from onboard.pull_request.forge.access import Access
from onboard.pull_request.forge.patience import LaterError, UnreachableError
from onboard.workflow.files import write_atomically

_SCP = re.compile(r"(?:[\w.-]+@)?(?P<host>[\w.-]+):(?!//)(?P<path>.+)")
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKEN = "ONBOARD_GIT_TOKEN"
_AWAY = re.compile(
    r"could not resolve|timed out|connection (?:refused|reset|closed)|hung up|early EOF"
    r"|network is unreachable|returned error: 5\d\d",
    re.IGNORECASE,
)
"""What git says of a host that may be there later."""
_HELPER = f'!f() {{ echo username=x-access-token; echo "password=${_TOKEN}"; }}; f'


@dataclass(frozen=True)
class RemoteName:
    """Where a git remote is, as its address in the configuration says."""

    remote: str
    host: str
    name: str
    """OWNER/NAME."""
    is_https: bool

    @property
    def owner(self) -> str:
        """The login of its owner."""
        return self.name.partition("/")[0]


Read = Callable[[str], str | None]
"""Path under the root -> what is there."""
Merged = Callable[[Read], Mapping[str, str]]


def remote_named(checkout: Checkout, remote: str) -> RemoteName:
    """Return what a remote's address says.

    Raises:
        UsageError: there is no such remote, or it is no repository of a host.
    """
    known = [each.name for each in checkout.repo.remotes]
    if remote not in known:
        found = ", ".join(known) or "none"
        raise UsageError(
            f"the repository has no remote {remote!r} (found: {found})",
            hint="Add it with git remote add, or name one with --remote",
        )
    # As it is written: what `insteadOf` makes of it is git's matter
    url = str(checkout.repo.remote(remote).config_reader.get("url"))
    parts, short = urlsplit(url), _SCP.fullmatch(url)
    if parts.scheme in ("https", "ssh", "git+ssh") and parts.hostname:
        host, path = parts.hostname, parts.path
    elif short and not parts.netloc:
        host, path = short["host"], short["path"]
    else:
        host, path = "", ""
    name = path.strip("/").removesuffix(".git")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"the remote {remote} is no repository of GitHub: {_without_login(url)}",
            hint="Name another one with --remote",
        )
    return RemoteName(remote, host, name, parts.scheme == "https")


def _without_login(url: str) -> str:
    return re.sub(r"(?<=//)[^/@]*@", "", url)


@dataclass
class RemoteBranch:
    """A branch of the checkout, and its place on a remote."""

    checkout: Checkout
    head: str
    origin: RemoteName
    """Where it is pushed to."""
    upstream: RemoteName
    """What has the target."""
    target: str
    access: Access
    merged: Merged = lambda _: {}
    """What files that all models add to have to be on top of others; these never conflict."""

    @property
    def tip(self) -> str:
        """The commit that it is at.

        Raises:
            UsageError: there is no such branch.
        """
        found = self._rev(f"refs/heads/{self.head}")
        if not found:
            raise UsageError(
                f"there is no branch {self.head}", hint="Run onboard MODEL first, which makes it"
            )
        return found

    def commits(self) -> int:
        """Return how many commits the branch has that its target, as last fetched, has not."""
        return int(self._git("rev-list", "--count", f"{self._tracking}..refs/heads/{self.head}"))

    def subjects(self) -> list[str]:
        """Return the titles of those commits, the first one first."""
        words = ("--reverse", "--format=%s", f"{self._tracking}..refs/heads/{self.head}")
        return self._git("log", *words).splitlines()

    def fetch(self) -> str:
        """Fetch the target; return its commit."""
        refs = f"+refs/heads/{self.target}:{self._tracking}"
        self._talk(self.upstream, "fetch", "--no-tags", self.upstream.remote, refs)
        return self._rev(self._tracking)

    def on_remote(self) -> str:
        """Return the commit that the remote has the branch at; "" where it has none."""
        line = self._talk(self.origin, "ls-remote", self.origin.remote, f"refs/heads/{self.head}")
        return line.split()[0] if line.strip() else ""

    def rebase(self) -> str:
        """Put the branch on top of its target; return its commit, which may be the old one.

        Raises:
            OnboardError: it has conflicts with the target; the branch is as it was.
        """
        target, old = self.fetch(), self.tip
        if self._is_ancestor(target, old):
            return old
        with self.apart(old) as folder:
            self._rebase_in(folder, target)
            new = str(self._repo_at(folder).head.commit.hexsha)
        self._move(old, new)
        return new

    def push(self, known: frozenset[str]) -> str:
        """Push the branch; return its commit.

        Args:
            known: commits that the remote may have it at, of earlier pushes.

        Raises:
            OnboardError: the remote has commits that are not here, or refuses.
        """
        tip, there = self.tip, self.on_remote()
        if there == tip:
            return tip
        if there and there not in known and not self._is_ancestor(there, tip):
            raise OnboardError(
                f"{self.head} has commits on {self.origin.remote} that are not here ({there[:12]})",
                hint=f"Fetch them, and put them on {self.head}",
            )
        lease = f"--force-with-lease=refs/heads/{self.head}:{there}"
        self._talk(self.origin, "push", lease, self.origin.remote, f"{tip}:refs/heads/{self.head}")
        return tip

    @contextmanager
    def apart(self, commit: str) -> Iterator[Path]:
        """Check a commit out in a folder of its own, for a while."""
        self._remove_leftovers()
        folder = Path(tempfile.mkdtemp(prefix=self._prefix))
        try:
            self._git("worktree", "add", "--detach", "--force", str(folder), commit)
            yield folder
        finally:
            self._remove(folder)

    def root_in(self, folder: Path) -> Path:
        """Return where the root is in a folder that has the repository."""
        return folder / self.checkout.prefix

    def _rebase_in(self, folder: Path, target: str) -> None:
        import git

        repo, step = self._repo_at(folder), target
        name, mail, _ = self.checkout.identity()
        committer = {"GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": mail}
        with repo.git.custom_environment(**committer, GIT_EDITOR="true"):
            while True:
                try:
                    repo.git.rebase(step)
                    return
                except git.GitCommandError as error:
                    files = repo.git.diff("--name-only", "-z", "--diff-filter=U").split("\0")[:-1]
                    if not self._merge(repo, files):
                        raise self._conflict(repo, files, error) from error
                    step = "--continue"

    def _merge(self, repo: Any, files: list[str]) -> bool:
        """Resolve the conflicts of a rebase where all are in files that all models add to."""

        def read(path: str) -> str | None:
            content = self.checkout.content(path, repo.head.commit.hexsha)
            return None if content is None else content.decode("utf-8")

        texts = {
            (self.checkout.prefix / path).as_posix(): text
            for path, text in self.merged(read).items()
        }
        if not files or set(files) - texts.keys():
            return False
        for path in files:
            write_atomically(Path(repo.working_tree_dir, path), texts[path])
            repo.git.add("--", path)
        return True

    def _conflict(self, repo: Any, files: list[str], error: Any) -> LaterError:
        """Give a rebase up; return what the user is told."""
        import git

        with suppress(git.GitCommandError):
            repo.git.rebase("--abort")
        what = f"in {', '.join(files[:3])}" if files else _reason(error)
        return LaterError(
            f"{self.head} conflicts with {self.target} {what}",
            hint=f"Rebase {self.head} on {self.upstream.remote}/{self.target} by hand",
        )

    def _move(self, old: str, new: str) -> None:
        """Have the branch at another commit, with its files where it is checked out."""
        place = self.checkout.checked_out().get(self.head)
        if place is None:
            self._git("update-ref", f"refs/heads/{self.head}", new, old)
            return
        self._run(self._repo_at(place), "reset", "--keep", new)

    @property
    def _tracking(self) -> str:
        return f"refs/remotes/{self.upstream.remote}/{self.target}"

    @property
    def _prefix(self) -> str:
        return f"onboard-{re.sub(r'[^A-Za-z0-9.-]+', '-', self.head)}-"

    def _remove_leftovers(self) -> None:
        """Remove what a killed run has checked out."""
        folders = [Path(place) for place in self.checkout.worktrees()]
        for folder in folders:
            if folder.name.startswith(self._prefix):
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        import git

        with suppress(git.GitCommandError):
            self.checkout.repo.git.worktree("remove", "--force", str(folder))
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(git.GitCommandError):
            self.checkout.repo.git.worktree("prune")

    def _repo_at(self, folder: Path) -> Any:
        import git

        return git.Repo(folder)

    def _rev(self, name: str) -> str:
        import git

        try:
            return str(
                self.checkout.repo.git.rev_parse("--verify", "--quiet", f"{name}^{{commit}}")
            )
        except git.GitCommandError:
            return ""

    def _is_ancestor(self, old: str, new: str) -> bool:
        import git

        try:
            self.checkout.repo.git.merge_base("--is-ancestor", old, new)
        except git.GitCommandError:
            return False
        return True

    def _git(self, *words: str) -> str:
        return self._run(self.checkout.repo, *words)

    def _talk(self, remote: RemoteName, *words: str) -> str:
        """Run git with what it needs to speak to a remote: the token, where the user's own
        credentials do not do.
        """
        environment, options = {"GIT_TERMINAL_PROMPT": "0"}, []
        if remote.is_https and remote.host == self.access.host:
            environment[_TOKEN] = self.access.token
            options = ["-c", f"credential.https://{remote.host}.helper={_HELPER}"]
        with self.checkout.repo.git.custom_environment(**environment):
            try:
                return self._run(self.checkout.repo, *options, *words)
            except OnboardError as error:
                if _AWAY.search(error.message):
                    raise UnreachableError(
                        error.message, hint="Run the command again later"
                    ) from None
                raise

    def _run(self, repo: Any, *words: str) -> str:
        import git

        try:
            return str(repo.git.execute(["git", *words]))
        except git.GitCommandError as error:
            name = next(word for word in words if not word.startswith("-") and "=" not in word)
            reason = self.access.hidden(_reason(error))
            raise OnboardError(f"git {name} failed: {reason}") from None


def _reason(error: Any) -> str:
    text = " ".join(str(error.stderr).split())
    return _without_login(text.removeprefix("stderr: ").strip("'"))[:500]
