"""Pages as a person sees them: in a headless Chromium, in a colour scheme and a width, without a
network.

Needs the extra `browser`, and a Chromium: the system's, or what `playwright install chromium` has
    put there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

LEAST_CONTRAST = 4.5
"""Of text against what is behind it (WCAG 2.2, 1.4.3, level AA)."""
_SYSTEM = ("chromium", "chromium-browser", "google-chrome")
_AUDIT = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


@contextmanager
def opened() -> Iterator[Browser]:
    """Yield a browser, closed at the end."""
    found = next(filter(None, map(shutil.which, _SYSTEM)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


def problems(
    browser: Browser,
    page: Path | str,
    *,
    width: int,
    scheme: Any,
    picture: Path | None = None,
    others: str = "",
    first: Callable[[Page], object] = lambda _: None,
) -> list[str]:
    """Return what is wrong with a page on a screen of `width` pixels: "light" or "dark" is the
    reader's `scheme`.

    That is a page wider than the screen, text that is cut off, squeezed, covered by other text or
    hard to tell from its background, an error on the console, and anything fetched from elsewhere.
    Folded parts are unfolded. A page that a server has goes by its address, and `first` is done with
    it before it is looked at. What the selector `others` finds has the colours and the width of
    another's style.
    """
    found: list[str] = []
    address = page if isinstance(page, str) else page.resolve().as_uri()
    own = page if isinstance(page, str) else "file:"

    def fetched(request: Request) -> None:
        if not request.url.startswith((own, "data:", "blob:")):
            found.append(f"fetches {request.url}")

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            found.append(f"console: {message.text}")

    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,
        offline=isinstance(page, Path),
    )
    try:
        tab = context.new_page()
        tab.on("request", fetched)
        tab.on("console", said)
        tab.on("pageerror", lambda error: found.append(f"error: {error}"))
        tab.goto(address)
        first(tab)
        found += tab.evaluate(_AUDIT, {"least": LEAST_CONTRAST, "others": others})
        if picture is not None:
            tab.screenshot(path=picture, full_page=True)
    finally:
        context.close()
    return found
