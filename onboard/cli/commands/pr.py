"""`onboard pr`: a model's pull request on GitHub, from its opening to its end."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onboard.cli.options import AsJson, Device, DTypeName, InDType, OnDevice
from onboard.cli.result import Result
from onboard.cli.terminal import one_line, shown
from onboard.errors import OnboardError, UsageError

if TYPE_CHECKING:
    from onboard.pull_request.cycle import PullRequestWork
    from onboard.pull_request.opened_work import Place
    from onboard.pull_request.pull_journal import PullJournal
    from onboard.workflow.phase import RunOptions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Open, update and watch a model's pull request on GitHub.",
    epilog="The token is that of GH_TOKEN or GITHUB_TOKEN, or gh auth token's. See docs/pull_requests.md.",
)

_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model, as it was given to onboard.")
]
_AnyModel = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="The model, as it was given to onboard.", show_default="all"
    ),
]
_Root = Annotated[
    Path,
    typer.Option(
        help="Root folder that the model was onboarded under.", file_okay=False, show_default="here"
    ),
]
_Remote = Annotated[
    str, typer.Option(help="Git remote that the branch is pushed to.", show_default="origin")
]
_Upstream = Annotated[
    str,
    typer.Option(
        help="Git remote that has the target.",
        show_default="upstream where there is one, or --remote",
    ),
]
_Target = Annotated[
    str,
    typer.Option(help="Branch to merge into.", show_default="the repository's default branch"),
]
_Draft = Annotated[bool, typer.Option("--draft", help="Open it as a draft.")]
_Again = Annotated[
    bool, typer.Option("--again", help="Run and post again what is posted for this commit.")
]
_Interval = Annotated[
    float, typer.Option(min=0.01, metavar="SECONDS", help="Time between two looks at GitHub.")
]
_Quiet = Annotated[
    float,
    typer.Option(
        min=0.01, metavar="SECONDS", help="Time without activity after which you are told."
    ),
]
_Once = Annotated[bool, typer.Option("--once", help="Look once, act, and end.")]
_Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LOGIN",
        help="Act on what this person asks for, too, beside owners, members and collaborators; repeatable.",
    ),
]
_TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Allow the model's own Python code to run, in a sandbox."
    ),
]
_Unsandboxed = Annotated[
    bool,
    typer.Option("--unsandboxed", help="Allow that code to run where the system has no sandbox."),
]
_Agents = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML whose `agents:` says who plays which role."),
]
_Agent = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=WHO",
        help="Who plays a role: builtin, command:WORDS or openai:MODEL@URL; repeatable.",
    ),
]


@app.command("open")
def open_(
    model: _Model,
    root: _Root = Path(),
    remote: _Remote = "",
    upstream: _Upstream = "",
    target: _Target = "",
    draft: _Draft = False,
    device: OnDevice = Device.AUTO,
    dtype: InDType = DTypeName.AUTO,
    trust_remote_code: _TrustRemoteCode = False,
    unsandboxed: _Unsandboxed = False,
    as_json: AsJson = False,
) -> Result | None:
    """Open the pull request of a model's branch.

    The branch is rebased on its target, tested and run in a clean checkout, pushed, and proposed with
    the generated text; the logs follow as comments.
    """
    options = _options(device, dtype, trust_remote_code, unsandboxed)
    work = _work(model, root, options, _place(remote, upstream, target))
    journal = work.open(draft=draft)
    return _ended(journal, as_json, f"opened {journal.url}")


@app.command("update")
def update(
    model: _Model,
    root: _Root = Path(),
    remote: _Remote = "",
    upstream: _Upstream = "",
    again: _Again = False,
    device: OnDevice = Device.AUTO,
    dtype: InDType = DTypeName.AUTO,
    trust_remote_code: _TrustRemoteCode = False,
    unsandboxed: _Unsandboxed = False,
    as_json: AsJson = False,
) -> Result | None:
    """Rebase, push, run again, and post the logs.

    Tests and run are made in a clean checkout of the pushed commit, and posted whole.
    """
    options = _options(device, dtype, trust_remote_code, unsandboxed)
    work = _work(model, root, options, _place(remote, upstream, ""))
    journal, proof = work.update(again=again)
    error = None
    if not proof.passed:
        error = OnboardError(f"on {proof.commit[:12]}, {proof.summary}", hint=f"See {journal.url}")
    return _ended(journal, as_json, f"updated {journal.url}: {proof.summary}", error)


@app.command("watch")
def watch(
    model: _Model,
    root: _Root = Path(),
    remote: _Remote = "",
    upstream: _Upstream = "",
    interval: _Interval = 300.0,
    quiet: _Quiet = 7200.0,
    once: _Once = False,
    trust: _Trust = None,
    agents: _Agents = None,
    agent: _Agent = None,
    device: OnDevice = Device.AUTO,
    dtype: InDType = DTypeName.AUTO,
    trust_remote_code: _TrustRemoteCode = False,
    unsandboxed: _Unsandboxed = False,
    as_json: AsJson = False,
) -> Result | None:
    """Answer what is said until it is approved or closed.

    A question is answered from the evidence. A change that is asked for is made by the repairer, or
    is a reviewer's suggestion; it is proven and tested before it is pushed. Only owners, members and
    collaborators of the repository can ask, and whom --trust names. Run it again after a kill: it
    answers nothing twice, and skips nothing.
    """
    from onboard.cli.progress import observer
    from onboard.pull_request.watch.watch_lock import watching
    from onboard.pull_request.watch.watch_loop import Watch
    from onboard.pull_request.watch.workflow_hands import WorkflowHands

    options = _options(device, dtype, trust_remote_code, unsandboxed, agents, agent)
    work = _work(model, root, options, _place(remote, upstream, ""))
    with watching(work.context.work_dir):
        pull, journal = work.current()
        trusted = frozenset(login.lower() for login in trust or ())
        hands = WorkflowHands(work, observer())
        seen = Watch(
            pull,
            work.context.work_dir,
            hands,
            trusted,
            _tell,
            acting=work.acting,
            log=work.context.worklog.append,
            quiet=quiet,
        )
        _tell(f"watches {journal.url}")
        ended = seen.poll() if once else seen.until_ended(interval)
    return _ended(seen.journal, as_json, f"{journal.url}: {ended or 'open'}")


@app.command("status")
def status(model: _AnyModel = None, root: _Root = Path(), as_json: AsJson = False) -> Result | None:
    """Show what is open, and what waits for whom.

    It is what was last seen; GitHub is not asked.
    """
    from onboard.pull_request.standing import standings
    from onboard.workflow.phase_runner import work_folder

    folder = work_folder(root.expanduser().resolve(), _identity(model)).name if model else ""
    found = standings(root.expanduser(), folder)
    if model and not found:
        raise UsageError(f"{model} has no pull request", hint=f"Open one: onboard pr open {model}")
    if as_json:
        return Result({"pull_requests": [each.model_dump(mode="json") for each in found]})
    if not found:
        print(f"No model under {root.resolve()} has a pull request.")
    for each in found:
        print("\n".join(map(shown, each.lines)))
    return None


def _identity(model: str) -> str:
    from onboard.registry import identity

    return identity(model)


def _options(
    device: Device,
    dtype: DTypeName,
    trust_remote_code: bool,
    unsandboxed: bool,
    agents: Path | None = None,
    agent: list[str] | None = None,
) -> RunOptions:
    from onboard.agents.role_settings import load_settings
    from onboard.workflow.phase import RunOptions

    return RunOptions(
        agents=load_settings(agents, agent or ()),
        device=device.value,
        dtype=dtype.value,
        trust_remote_code=trust_remote_code,
        unsandboxed=unsandboxed,
    )


def _place(remote: str, upstream: str, target: str) -> Place:
    from onboard.pull_request.opened_work import Place

    return Place(remote, upstream, target)


def _work(model: str, root: Path, options: RunOptions, place: Place) -> PullRequestWork:
    from onboard.pull_request.opened_work import open_work

    return open_work(model, root, options, place, _tell)


def _tell(text: str) -> None:
    print(one_line(f"{datetime.now():%H:%M:%S} {text}"), file=sys.stderr, flush=True)


def _ended(
    journal: PullJournal, as_json: bool, line: str, error: OnboardError | None = None
) -> Result | None:
    if as_json:
        return Result({"pull_request": journal.model_dump(mode="json")}, error)
    print(shown(line))
    if error is not None:
        raise error
    return None
