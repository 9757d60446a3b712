"""The server's page in a browser: a conversation that is streamed, stopped, continued and refused.

The engine stands still where the test has to be earlier than the answer's end.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from onboard.serve.service import Service
from tests.support.runtime.paused import SECONDS, paused, wait_until
from tests.support.serving import served, speaking_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.exhaustive
MILLISECONDS = SECONDS * 1000
PARTS = "article.assistant > div:last-child"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    pytest.importorskip("playwright", reason='the extra "browser" is not installed')
    from tests.support.browser import opened

    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    with served(speaking_model(tmp_path_factory.mktemp("served"))) as found:
        yield found


@pytest.fixture
def tab(chromium: Browser, server: tuple[str, Service]) -> Iterator[Page]:
    """The page, whose answers are words and do not end of themselves, whatever the weights are."""
    words = server[1].llm.llm.encode("the cat sat on the mat")

    def ask_for_words(route: Route) -> None:
        body = {**route.request.post_data_json, "allowed_token_ids": words}
        route.continue_(post_data=json.dumps(body))

    context = chromium.new_context()
    page = context.new_page()
    page.route("**/completions", ask_for_words)
    page.set_default_timeout(MILLISECONDS)
    page.goto(server[0])
    yield page
    context.close()


def said(tab: Page) -> str:
    return str(tab.locator(PARTS).last.text_content())


def ask(tab: Page, text: str, **settings: Any) -> None:
    for name, value in settings.items():
        tab.fill(f"#{name}", str(value))
    tab.fill("#text", text)
    tab.click("#send")


def ended(tab: Page) -> None:
    """Wait for the end of an answer; the page's policy forbids to have its script wait."""
    wait_until(lambda: tab.is_enabled("#send"))


def test_an_answer_is_streamed_stopped_and_continued(
    tab: Page, server: tuple[str, Service]
) -> None:
    engine, thread = server[1].llm.llm.engine, server[1].llm.thread
    cancelled = engine.stats.cancelled
    with paused(engine, after=20):
        ask(tab, "the cat", max_tokens=900, temperature=0, seed=1)
        wait_until(lambda: tab.locator(PARTS).count() and len(said(tab)) > 3)
        assert tab.is_disabled("#send")
        assert tab.is_disabled("#more")
        tab.click("#stop")
        ended(tab)
        wait_until(lambda: not thread.running)
    assert engine.stats.cancelled == cancelled + 1
    first = said(tab)
    tab.fill("#max_tokens", "8")
    tab.click("#more")
    ended(tab)
    assert said(tab).startswith(first)
    assert len(said(tab)) > len(first)
    assert tab.locator("article").count() == 2
    assert "a second" in str(tab.text_content("#speed"))
    ask(tab, "the dog", max_tokens=4)
    ended(tab)
    assert tab.locator("article").count() == 4
    tab.click("#anew")
    assert tab.locator("article").count() == 0


def test_text_goes_on_and_is_no_page(tab: Page) -> None:
    tab.select_option("#kind", "text")
    ask(tab, "the <b>cat</b>", max_tokens=3, temperature=0)
    ended(tab)
    assert tab.locator("article.user b").count() == 0
    assert "<b>cat</b>" in str(tab.locator("article.user").text_content())
    assert said(tab)


def test_a_refusal_is_shown_and_leaves_nothing(tab: Page) -> None:
    ask(tab, "the " * 2000)
    ended(tab)
    assert "can have" in str(tab.text_content("#error"))
    assert tab.locator("article.assistant").count() == 0
    ask(tab, "the cat", max_tokens=2)  # what was too long is still said
    ended(tab)
    tab.click("#anew")
    ask(tab, "the cat", max_tokens=2)
    ended(tab)
    assert tab.text_content("#error") == ""
    assert said(tab)


def test_the_queue_and_the_cache_are_drawn(tab: Page, server: tuple[str, Service]) -> None:
    with paused(server[1].llm.llm.engine, after=3):
        ask(tab, "the cat", max_tokens=900)
        wait_until(lambda: str(tab.text_content("#queue")).startswith("1 outputs run"))
        wait_until(lambda: not str(tab.text_content("#pages")).startswith("0.0"))
        assert len(str(tab.get_attribute("#running", "points")).split()) >= 1
        tab.click("#stop")
        ended(tab)


def test_light_dark_and_narrow(chromium: Browser, server: tuple[str, Service]) -> None:
    """Nothing is cut off, squeezed or hard to read, and nothing comes from elsewhere."""
    from tests.support.browser import problems

    def talk(tab: Page) -> None:
        ask(tab, "the cat " + "and a word of many letters" * 3, max_tokens=12, temperature=0)
        ended(tab)
        ask(tab, "the " * 2000)
        ended(tab)

    for width, scheme in itertools.product((360, 500, 1280), ("light", "dark")):
        found = problems(chromium, server[0], width=width, scheme=scheme, first=talk)
        # Chromium itself logs an answer of 400, which the page shows.
        assert [each for each in found if "status of 400" not in each] == [], (width, scheme)
