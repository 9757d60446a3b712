"""Structured outputs of random JSON schemas, of the demo model: each is what its schema says."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from onboard import LLM, SamplingParams, StructuredOutputs
from onboard.content import CONTENT_ROOT
from tests.support.json_schemas import SPACES, bounded_schema, longest

DEMO = CONTENT_ROOT / "onboard" / "assets" / "demo"
TOKENS = 480
"""What the demo model has room for."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO, root=CONTENT_ROOT, device="cpu", dtype="float32")


def wanted(schema: dict[str, Any], seed: int) -> SamplingParams:
    structure = StructuredOutputs(json_schema=schema)
    return SamplingParams(structured_outputs=structure, seed=seed, max_tokens=TOKENS)


@pytest.mark.parametrize(
    "count", [40, pytest.param(1000, marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
def test_answers_are_what_random_schemas_say(llm: LLM, count: int) -> None:
    """jsonschema judges. No schema has an answer that the room could cut off: a token has a byte at
    least.
    """
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    schemas = [bounded_schema(random.Random(seed + index), TOKENS) for index in range(count)]
    params = [wanted(schema, seed + index) for index, schema in enumerate(schemas)]
    outputs = llm.generate(["Once upon a time"] * count, params)
    seen: Counter[str] = Counter()
    for schema, output in zip(schemas, outputs, strict=True):
        Draft202012Validator.check_schema(schema)
        assert output.finish_reason == "stop", (schema, output.text)
        space = SPACES[schema.get("x-guidance", {}).get("whitespace_pattern")]
        assert len(output.text.encode()) <= longest(schema).with_spaces(space), schema
        value = json.loads(output.text)
        checker = Draft202012Validator.FORMAT_CHECKER
        errors = list(Draft202012Validator(schema, format_checker=checker).iter_errors(value))
        assert not errors, (schema, output.text)
        seen[type(value).__name__] += 1
    print(dict(seen), sum(len(each.token_ids) for each in outputs), "tokens")
    assert len(seen) > 4
