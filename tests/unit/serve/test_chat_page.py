"""The page at `/`: whole without anything from elsewhere, and run under a policy that knows it."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from onboard.serve.chat_page import add_page


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    add_page(app)
    return TestClient(app)


def test_its_policy_is_of_its_own_script_and_style(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert client.head("/").status_code == 200
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        [text] = re.findall(rf"(?s)<{kind}>(.*?)</{kind}>", answer.text)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"


def test_it_has_nothing_from_elsewhere_and_no_text_becomes_code(client: TestClient) -> None:
    page = client.get("/").text
    assert "//" not in re.sub(r"(?m)^\s*//.*$", "", page), "an address"
    assert not re.search(r"\s(src|srcset|on\w+|style)=", page)
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in page
