"""The page at `/` on which a person tries the model: one file, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

_FILE = Path(__file__).with_suffix(".html")


def add_page(app: FastAPI) -> None:
    """Add the page, with headers that let a browser run its own script alone."""
    page = _FILE.read_bytes()
    headers = {
        "Content-Security-Policy": _policy(page.decode()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def chat_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)


def _policy(page: str) -> str:
    """Return a policy (https://www.w3.org/TR/CSP3/) that names script and style by their hashes."""
    own = {
        kind: " ".join(_hash(text) for text in re.findall(rf"(?s)<{kind}>(.*?)</{kind}>", page))
        for kind in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']};"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
