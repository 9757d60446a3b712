"""Git, through GitPython: commits on a branch of their own that leave working tree, HEAD and index
alone.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError

NEUTRAL_IDENTITY = ("onboard", "onboard@localhost")
"""Who commits when git does not know the user."""


@dataclass(frozen=True)
class BranchUpdate:
    """What became of a branch."""

    branch: str
    commit: str
    """The branch's tip now."""
    status: str
    """"created", "updated", "unchanged", or "checked out": the branch is in use and was left
    alone.
    """
    identity: str
    """`Name <mail>` of the committer."""
    identity_is_neutral: bool
    """Git has no identity configured here."""


def branch_name(label: str) -> str:
    """Return `onboard/<label>` as git accepts it (git-check-ref-format)."""
    clean = re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._-]", "-", label)).strip(".-") or "model"
    return f"onboard/{clean}_" if clean.endswith(".lock") else f"onboard/{clean}"


class Checkout:
    """The git checkout that a root belongs to."""

    def __init__(self, repo: Any, root: Path) -> None:
        self._repo = repo
        self._prefix = root.resolve().relative_to(Path(repo.working_tree_dir).resolve())

    @classmethod
    def find(cls, root: Path) -> Checkout | None:
        """Return the checkout of `root`; None when it is in none, or is ignored by the one around
        it.
        """
        try:
            import git
        except ImportError:  # GitPython raises it when there is no git executable
            return None
        try:
            repo = git.Repo(root, search_parent_directories=True)
        except (git.InvalidGitRepositoryError, git.NoSuchPathError):
            return None
        if repo.bare or repo.working_tree_dir is None or repo.ignored(str(root.resolve())):
            return None
        return cls(repo, root)

    @property
    def repo(self) -> Any:
        """GitPython's repository."""
        return self._repo

    @property
    def prefix(self) -> Path:
        """The root's place in the repository."""
        return self._prefix

    @property
    def head(self) -> str:
        """The commit that is checked out, with "-dirty" where files differ; empty before the first
        one.
        """
        return _head_of(self._repo) if self._repo.head.is_valid() else ""

    def changed(self) -> list[str]:
        """Return the files, from the top of the repository, that git keeps and that are not as HEAD
        has them.
        """
        if not self._repo.head.is_valid():
            return []
        return [
            path for path in self._repo.git.diff("--name-only", "-z", "HEAD").split("\0") if path
        ]

    def read(self, path: str, branch: str) -> str | None:
        """Return a file's text as the branch has it, as HEAD has it while there is no such branch,
        or None.
        """
        tip = self._tip(branch) or self._head()
        try:
            blob = tip.tree / str(self._prefix / path) if tip else None
        except KeyError:
            return None
        return blob.data_stream.read().decode("utf-8") if blob else None

    def content(self, path: str, commit: str) -> bytes | None:
        """Return a file's content as a commit has it; None where it has none, or is none itself."""
        import git

        try:
            blob = self._repo.commit(commit).tree / str(self._prefix / path)
        except (KeyError, ValueError, git.GitError):
            return None
        content: bytes = blob.data_stream.read()
        return content

    def base(self, commit: str, target: str) -> tuple[str, str]:
        """Return the last commit that `commit` has in common with `target`, and the target's tip;
        each "" where there is none.
        """
        import git

        try:
            bases = self._repo.merge_base(commit, target)
            return (bases[0].hexsha if bases else ""), self._repo.commit(target).hexsha
        except (ValueError, git.GitError, git.BadName):
            return "", ""

    def commit(self, branch: str, files: Mapping[str, str], message: str) -> BranchUpdate:
        """Commit `files` (path below the root -> text) on top of `branch`, which starts at HEAD
        when it is new.

        Nothing is committed when the branch has these texts already. Raises `OnboardError` when git
        refuses.
        """
        import git

        old = self._tip(branch)
        parent = old or self._head()
        name, mail, neutral = self.identity()
        try:
            tree = self._write_tree(parent, files)
            if parent is not None and tree == parent.tree.hexsha and old is not None:
                status, commit = "unchanged", old.hexsha
            elif branch in self.checked_out():
                status, commit = "checked out", old.hexsha if old else ""
            else:
                commit = self._commit_tree(tree, parent, message, name, mail)
                self._repo.git.update_ref(
                    f"refs/heads/{branch}", commit, old.hexsha if old else "0" * 40
                )
                status = "updated" if old else "created"
        except git.GitCommandError as error:
            reason = " ".join(str(error.stderr).split()).removeprefix("stderr: ")
            raise OnboardError(f"git could not prepare the branch {branch}: {reason}") from error
        return BranchUpdate(branch, commit, status, f"{name} <{mail}>", neutral)

    def _write_tree(self, parent: Any, files: Mapping[str, str]) -> str:
        """Write the tree of `parent` with `files` put in, through an index of its own; return its
        hash.
        """
        with (
            tempfile.TemporaryDirectory() as folder,
            self._repo.git.custom_environment(GIT_INDEX_FILE=str(Path(folder, "index"))),
        ):
            self._repo.git.read_tree(parent.hexsha if parent else "--empty")
            for path, text in files.items():
                place = (self._prefix / path).as_posix()
                content = Path(folder, "content")
                content.write_text(text, encoding="utf-8", newline="\n")
                blob = self._repo.git.hash_object("-w", "--path", place, str(content))
                self._repo.git.update_index("--add", "--cacheinfo", f"100644,{blob},{place}")
            return str(self._repo.git.write_tree())

    def _commit_tree(self, tree: str, parent: Any, message: str, name: str, mail: str) -> str:
        parents = ["-p", parent.hexsha] if parent else []
        identity = {
            f"GIT_{role}_{key}": value
            for role in ("AUTHOR", "COMMITTER")
            for key, value in (("NAME", name), ("EMAIL", mail))
        }
        with self._repo.git.custom_environment(**identity):
            return str(self._repo.git.commit_tree(tree, *parents, "-m", message))

    def _tip(self, branch: str) -> Any:
        return next((head.commit for head in self._repo.heads if head.name == branch), None)

    def _head(self) -> Any:
        return self._repo.head.commit if self._repo.head.is_valid() else None

    def worktrees(self) -> dict[str, str]:
        """Return the folders in which something of the repository is checked out, with the branch;
        "" for a commit.
        """
        found: dict[str, str] = {}
        folder = ""
        for line in self._repo.git.worktree("list", "--porcelain").splitlines():
            name, _, value = line.partition(" ")
            if name == "worktree":
                folder = value
                found[folder] = ""
            elif name == "branch":
                found[folder] = value.removeprefix("refs/heads/")
        return found

    def checked_out(self) -> dict[str, Path]:
        """Return the branches that some worktree of the repository has checked out, and where."""
        return {branch: Path(place) for place, branch in self.worktrees().items() if branch}

    def identity(self) -> tuple[str, str, bool]:
        """Return name, mail, and whether they are the neutral ones; what the user set for git comes
        first.
        """
        reader = self._repo.config_reader()
        name = os.environ.get("GIT_AUTHOR_NAME") or reader.get_value("user", "name", "")
        mail = os.environ.get("GIT_AUTHOR_EMAIL") or reader.get_value("user", "email", "")
        return (str(name), str(mail), False) if name and mail else (*NEUTRAL_IDENTITY, True)


def commit_of(folder: Path) -> str:
    """Return the commit of the checkout that `folder` is the top of, with "-dirty" where files
    differ; else "".
    """
    try:
        import git
    except ImportError:  # there is no git executable
        return ""
    try:
        return _head_of(git.Repo(folder))
    # No checkout, one without a commit, or one of another user, whose objects git refuses to read
    except (git.GitError, ValueError, OSError):
        return ""


def _head_of(repo: Any) -> str:
    return f"{repo.head.commit.hexsha}{'-dirty' if repo.is_dirty() else ''}"
