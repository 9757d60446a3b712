"""What is read in a comment, and the marks of posts."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from onboard.pull_request.forge.posts import answered, log_posts, mark_of, post
from onboard.pull_request.forge.remarks import Said
from onboard.pull_request.watch.speech import kind_of, suggestion_of

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def said(body: str, verdict: str = "") -> Said:
    return Said(
        "review" if verdict else "comment", 1, "a", "OWNER", False, body, WHEN, verdict=verdict
    )


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("Why is the window 8?", "question"),
        ("How large is the error of the attention?", "question"),
        ("Can you explain the scale?", "question"),
        ("Could you tell me which test covers this?", "question"),
        ("I wonder why that is", "question"),
        ("Are there no further changes?", "question"),
        ("Looks good. Why 3?", "question"),
        ("Shouldn't this be float32?", "question"),
        ("Could you rename this?", "change request"),
        ("Please use torch_linear here.", "change request"),
        ("Rename hidden to x.", "change request"),
        ("nit: rename", "change request"),
        ("This is wrong for long contexts.", "change request"),
        ("It should be 1e-5 instead of 1e-6.", "change request"),
        ("Should we use torch_linear? Please do.", "change request"),
        ("LGTM but rename it", "change request"),
        ("Why? Please fix it.", "change request"),
        ("```suggestion\nx = 1\n```", "change request"),
        ("LGTM", "approval"),
        ("LGTM, thanks!", "approval"),
        ("Looks good to me.", "approval"),
        ("No further changes.", "end"),
        ("no more changes needed, thanks", "end"),
        ("We're done.", "end"),
        ("Nothing else from me.", "end"),
        ("We are not done", "noise"),
        ("We aren't done", "noise"),
        ("LGTM but CI is red", "noise"),
        ("Looks good once CI passes", "noise"),
        ("No further changes until CI passes.", "noise"),
        ("Thanks!", "noise"),
        ("", "noise"),
        ("> please fix\nThanks.", "noise"),
        ("<!-- please fix -->nice", "noise"),
        ("<!-- please fix", "noise"),
        ("```\nplease fix?\n```", "noise"),
        ("`please fix`", "noise"),
        ("https://x.test/please?fix=1", "noise"),
    ],
)
def test_what_is_wanted(body: str, kind: str) -> None:
    assert kind_of(said(body)) == kind


@pytest.mark.parametrize(
    ("verdict", "body", "kind"),
    [
        ("APPROVED", "", "approval"),
        ("APPROVED", "Nice work", "approval"),
        ("APPROVED", "Please rename it.", "change request"),
        ("CHANGES_REQUESTED", "", "noise"),
        ("COMMENTED", "Why?", "question"),
    ],
)
def test_what_a_review_wants(verdict: str, body: str, kind: str) -> None:
    assert kind_of(said(body, verdict)) == kind


def test_long_and_odd_comments_are_read_in_time() -> None:
    for body in (
        "a" * 65_536,
        "but " * 16_000,
        "`" * 65_536,
        "?" * 65_536,
        "<!--" * 16_000,
        "> \n" * 20_000,
    ):
        kind_of(said(body))


def test_a_suggestion() -> None:
    assert suggestion_of("see\r\n```suggestion\r\nx = 1\r\ny\r\n```\r\nok") == "x = 1\ny\n"
    assert suggestion_of("```suggestion\n```") == ""
    assert suggestion_of("```python\nx\n```") is None
    assert suggestion_of("````suggestion\n```\n````") == "```\n"


def test_a_mark_is_the_last_thing_of_a_post_of_ours() -> None:
    [made] = post("text with <!-- onboard: answers comment-9 --> in it", "answers comment-1")
    assert mark_of(made.body) == "answers comment-1"
    assert mark_of(made.body.replace("\n", "\r\n")) == "answers comment-1"
    assert mark_of(f"{made.body}\nmore") == ""
    assert mark_of(made.body.removeprefix("[AGENT]")) == ""


def test_what_is_answered_in_part_is_not_answered() -> None:
    assert answered(
        ["answers a-1", "answers b-1 1/2", "answers c-1 1/2", "answers c-1 2/2", "log x"]
    ) == {
        "a-1",
        "c-1",
    }


def test_a_log_that_has_marks_and_fences_forges_nothing() -> None:
    log = "````\n<!-- onboard: answers comment-1 -->\n"
    for made in log_posts("Log", "About:", log * 3000, "log abc"):
        assert mark_of(made.body).startswith("log abc ")
        assert len(made.body) <= 65_536
