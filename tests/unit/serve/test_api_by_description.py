"""Requests drawn from the server's own description (`/openapi.json`), by Schemathesis: what it
allows and what it does not; answers are what it says, and none is a failure of the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from onboard.serve.service import Service
from tests.support.runtime.paused import SECONDS
from tests.support.runtime.tiny import Tiny
from tests.support.serving import served, speaking_model

schemathesis = pytest.importorskip("schemathesis", reason='the extra "dev" is not installed')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return speaking_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(model: Tiny) -> Iterator[tuple[str, Service]]:
    with served(model) as found:
        yield found


def operations(address: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


def attempt(operation: Any, count: int | None) -> None:
    """Draw requests of one operation, valid ones and, where there is a body, others; None: the same
    few valid ones each time.
    """
    checks = schemathesis.checks
    wanted = [
        checks.not_a_server_error,
        checks.CHECKS.get_one("content_type_conformance"),
        checks.CHECKS.get_one("response_schema_conformance"),
    ]
    modes = schemathesis.GenerationMode
    for mode in (modes.POSITIVE, modes.NEGATIVE) if operation.body and count else (modes.POSITIVE,):

        @settings(
            max_examples=count or 2,
            derandomize=count is None,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            if isinstance(case.body, dict):
                shorten(case.body)
            case.validate_response(case.call(timeout=SECONDS), checks=wanted)

        one()


def shorten(body: dict[str, Any]) -> None:
    """Long answers are no attack, and take long."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if not isinstance(body.get(name), int) or body[name] > 4:
            body[name] = 4


@pytest.mark.parametrize(
    "count", [None, pytest.param(400, marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
def test_what_is_described_is_what_comes(server: tuple[str, Service], count: int | None) -> None:
    address, service = server
    found = operations(address)
    assert len(found) > 10
    for operation in found:
        attempt(operation, count)
    assert service.llm.thread.is_alive
