"""What somebody wants: an answer, a change, nothing more, or nothing at all. Read by rules from plain
English; what cannot be read is told to the user, never guessed at.

Words of others in a comment (quotes, code), and what a page does not show (HTML comments), are not
its author's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from onboard.pull_request.forge.remarks import Said
from onboard.pull_request.pull_journal import Kind

MOST_READ = 20_000
"""Letters of a comment that are read."""
_NOT_SPOKEN = (
    re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL),
    re.compile(r"^(`{3,}|~{3,}).*?(?:^\1|\Z)", re.DOTALL | re.MULTILINE),
    re.compile(r"^ {0,3}>.*$", re.MULTILINE),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"https?://\S+"),
)
_SUGGESTION = re.compile(
    r"^(?P<fence>`{3,})suggestion[^\n]*\n(?P<text>.*?)^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE
)
_SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?](?!\s|$)[^.!?\n]+)*[.!?]*")
_VERBS = (
    "use|rename|remove|add|change|replace|fix|move|drop|delete|make|avoid|simplify|split|inline|"
    "update|revert|correct|merge|extract|keep|write|set|put|return|call|document|reuse|mend|apply|"
    "swap|repair|adjust|clean|shorten|restore|annotate|type|don't|do not|stop"
)
_EXPLAIN = "explain|tell|say|show|clarify|elaborate|point|confirm|share"
_POLITE = re.compile(
    rf"^(?:(?:and|but|also),? )?(?:can|could|would|will) (?:you|we)\b(?! (?:{_EXPLAIN}))",
    re.IGNORECASE,
)
"""A question that asks for a change: "Could you rename it?"."""
_REQUEST = re.compile(
    r"^(?:(?:and|but|also|then|so|ok|okay|minor)\b[:, ]*)*(?:kindly|let's)?,? ?(?:also )?"
    rf"(?:{_VERBS})\b"
    r"|\bplease\b"
    r"|\b(?:should|must|needs? to|has to|have to|ought to)\b"
    r"|\b(?:i would|i'd|we should|better to|it would be (?:better|nicer|good)|instead of)\b"
    r"|\bis (?:wrong|incorrect|broken|missing|redundant|unused|misleading|a (?:bug|typo|mistake))\b"
    r"|\bnit\b"
    rf"|{_POLITE.pattern}",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r",? (?:but|although|though|except)(?: that)? |; ?")
_ASKED = re.compile(
    r"^(?:(?:and|but|also|so|hm+|just curious)[:,]? )*(?:why|what|how|where|which|who|when|is|are"
    r"|was|were|does|do|did|has|have|can|could|would|should|shouldn't|isn't|may i)\b",
    re.IGNORECASE,
)
_END = re.compile(
    r"\bno (?:further|more|other|additional) (?:changes?|comments?|work|requests?|feedback)\b"
    r"|\bnothing (?:more|else|further)(?: (?:to|is|from|needed)\b.*)?[.! ]*$"
    r"|\b(?:we're|we are|you're|you are) (?:all )?done\b"
    r"|\bagent work (?:is )?(?:complete|done)\b",
    re.IGNORECASE,
)
_LIKED = re.compile(
    r"^(?:this |it |all |now )?(?:lgtm|looks (?:good|great|fine|right)(?: to me| now)*|ship it"
    r"|approved|i approve(?: this)?|good to (?:go|merge))\b",
    re.IGNORECASE,
)
_NOT_YET = re.compile(
    r"\b(?:not|except|unless|until|once|after|if|when|but|before|yet)\b|n't\b", re.IGNORECASE
)


def kind_of(said: Said) -> Kind:
    """Return what somebody who may ask wants."""
    found = kinds_of(said)
    order: tuple[Kind, ...] = ("change request", "question", "end", "approval")
    return next((kind for kind in order if kind in found), "noise")


def kinds_of(said: Said) -> set[Kind]:
    """Return all that somebody wants."""
    found = {_kind_of_sentence(each) for each in sentences(said.body)}
    if said.verdict == "APPROVED":
        found.add("approval")
    if suggestion_of(said.body) is not None:
        found.add("change request")
    return found


def sentences(body: str) -> list[str]:
    """Return the sentences that an author says."""
    text = body[:MOST_READ]
    for pattern in _NOT_SPOKEN:
        text = pattern.sub(" it ", text) if pattern is _NOT_SPOKEN[3] else pattern.sub("\n", text)
    found = (" ".join(each.strip(" \t*_#-:").split()) for each in _SENTENCE.findall(text))
    return [each for each in found if any(letter.isalpha() for letter in each)]


def suggestion_of(body: str) -> str | None:
    """Return the lines that a suggestion puts in place of those that it is about; None: there is
    none.
    """
    found = _SUGGESTION.search(body[:MOST_READ].replace("\r\n", "\n"))
    return found["text"] if found else None


def first_words(body: str, most: int = 100) -> str:
    """Return the beginning of a comment, in a line."""
    line = " ".join(body[: 4 * most].split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def words_of(texts: Iterable[str]) -> set[str]:
    """Return the words of texts, in lower case, parts of names among them."""
    joined = " ".join(texts)
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", joined).lower()
    return set(re.findall(r"[a-z0-9]+", parted)) | set(re.findall(r"[a-z0-9_]+", joined.lower()))


def _kind_of_sentence(text: str) -> Kind:
    asks = text.endswith("?")
    if asks and _ASKED.match(text) and not _POLITE.match(text):
        return "question"
    if any(_REQUEST.search(clause) for clause in _CLAUSE.split(text)):
        return "change request"
    if asks or text.lower().startswith("i wonder"):
        return "question"
    if _NOT_YET.search(text):
        return "noise"
    if _END.search(text):
        return "end"
    return "approval" if _LIKED.match(text) else "noise"
