"""A conversation on a terminal, or through pipes: a line each of what a person says."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from onboard.cli.terminal import one_line, shown
from onboard.errors import UsageError

if TYPE_CHECKING:
    from onboard.serve.answers.talking import Talk

_HELP = "/new begins anew, /quit or the end of the input ends; an interrupt cuts an answer off"
_NEW, _QUIT = "/new", "/quit"
_FAINT, _PLAIN = "\x1b[2m", "\x1b[0m"


def converse(talk: Talk, first: Sequence[str]) -> None:
    """Answer `first`, then what comes from standard input.

    A person at a terminal is asked, sees thoughts faintly, and may cut answers off. Of pipes each
    line is a message, and what is written are the answers alone, a line end behind each. Raises
    what the model refuses, a message that is too long for example, where nobody is there to say it
    otherwise.
    """
    person = sys.stdin.isatty() and sys.stdout.isatty()
    if person:
        print(_HELP, file=sys.stderr)
    for text in first:
        _one(talk, text, person)
    for text in _said(person):
        if text == _QUIT:
            return
        if text == _NEW:
            talk.forget()
        elif text.strip():
            _one(talk, text, person)


def _said(person: bool) -> Iterator[str]:
    """Yield lines until there are no more."""
    if not person:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401 (input edits lines, and remembers them, when it is there)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")
    print()


def _one(talk: Talk, text: str, person: bool) -> None:
    try:
        _show(talk, text, person)
    except UsageError as error:
        if not person:
            raise
        print(one_line(f"{error} ({_NEW} begins anew)"), file=sys.stderr)
    except KeyboardInterrupt:
        if not person:
            raise
        print(_PLAIN, flush=True)


def _show(talk: Talk, text: str, person: bool) -> None:
    """Write an answer as it comes."""
    from onboard.serve.answers.answer_pieces import CallPiece, ReasoningPiece

    thinks = False
    with closing(talk.answer(text)) as pieces:
        for piece in pieces:
            is_thought = isinstance(piece, ReasoningPiece)
            if is_thought and not person:
                continue
            if is_thought != thinks and person:
                sys.stdout.write(_FAINT if is_thought else f"{_PLAIN}\n")
            thinks = is_thought
            said = (
                f"{piece.name}({piece.arguments})" if isinstance(piece, CallPiece) else piece.text
            )
            sys.stdout.write(shown(said))
            sys.stdout.flush()
    print(_PLAIN if thinks else "", flush=True)
