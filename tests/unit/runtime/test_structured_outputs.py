"""Outputs that follow a schema, an expression, a grammar or a list of choices."""

from __future__ import annotations

import json
import random
import re
import shutil
from typing import Any

import jsonschema
import pytest

from onboard import LLM, SamplingParams, StructuredOutputs
from onboard.errors import UsageError
from onboard.testing.soak import in_double
from tests.support.runtime.tiny import Tiny, make_tiny, save_tokenizer

TEXT = '{"name": "cat", "age": 3, "tags": ["a", "b"], "ok": true, "none": null} yes no maybe'


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("speaking")
    size = save_tokenizer(folder / "tokenizer", TEXT)
    model = make_tiny(folder, vocab_size=size, eos_token_id=0, max_position_embeddings=1024)
    shutil.copytree(folder / "tokenizer", model.checkpoint, dirs_exist_ok=True)
    return model


def load(model: Tiny, **settings: Any) -> LLM:
    wanted = {"max_seq_len": 512, "max_batch_size": 16, **settings}
    return LLM(model.checkpoint, model.root, device="cpu", dtype="float32", settings=wanted)


@pytest.fixture(scope="module")
def llm(speaking: Tiny) -> LLM:
    return load(speaking)


def texts(llm: LLM, wanted: list[StructuredOutputs], seed: int, **options: Any) -> list[str]:
    params = [
        SamplingParams(
            structured_outputs=each, max_tokens=400, temperature=1.0, seed=seed + index, **options
        )
        for index, each in enumerate(wanted)
    ]
    outputs = llm.generate([""" """] * len(params), params)
    assert all(each.finish_reason == "stop" for each in outputs), [each.text for each in outputs]
    return [each.text for each in outputs]


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose values are short, so that a random model comes to their end."""
    kind = rng.choice(["integer", "boolean", "enum", "null", "array", "object", "string"])
    if kind == "enum":
        return {"enum": rng.sample(["a", "bc", 1, 2.5, None, True], k=rng.randint(1, 4))}
    if kind == "integer":
        return {"type": "integer", "minimum": 0, "maximum": rng.randint(1, 999)}
    if kind == "string":
        return {"type": "string", "pattern": "^[a-f]{1,6}$"}
    if depth and kind == "array":
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}
    if depth and kind == "object":
        names = rng.sample(["name", "age", "tags", "x y", "é"], k=rng.randint(1, 3))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = rng.sample(names, k=rng.randint(0, len(names)))
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    return {"type": rng.choice(["boolean", "null"])}


def test_json_follows_random_schemas(llm: LLM) -> None:
    """Beside an independent validator, many at once in one batch."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(48)]
    found = texts(llm, [StructuredOutputs(json_schema=each) for each in schemas], seed)
    for schema, text in zip(schemas, found, strict=True):
        jsonschema.validate(json.loads(text), schema)


def test_expressions_choices_and_grammars(llm: LLM) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    expression = r"[a-c]{2,5}-([0-9]{3}|x)"  # `\d` means other digits to another version of Unicode
    grammar = 'start: "(" start ")" | "yes"'
    wanted = [
        StructuredOutputs(regex=expression),
        StructuredOutputs(choice=["yes", 'no "way"', "maybe\n"]),
        StructuredOutputs(grammar=grammar),
    ]
    by_regex, by_choice, by_grammar = texts(llm, wanted, seed)
    assert re.fullmatch(expression, by_regex)
    assert by_choice in ("yes", 'no "way"', "maybe\n")
    depth = by_grammar.count("(")
    assert by_grammar == "(" * depth + "yes" + ")" * depth


def test_a_neighbour_without_constraint_is_as_alone(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    bound = SamplingParams(structured_outputs=StructuredOutputs(choice=["maybe"]), max_tokens=20)
    alone = llm.generate(["yes"], free)[0].token_ids
    together = llm.generate(["yes", "no"], [free, bound])
    assert together[0].token_ids == alone
    assert together[1].text == "maybe"


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_all_kinds_in_one_batch_are_as_alone(speaking: Tiny, overlap: bool) -> None:
    """Schemas, expressions, penalties, exclusions and none of them; also where a step is launched
    before the tokens are known that its masks follow.
    """
    rng = random.Random(seed := random.randrange(1 << 30))
    print(f"seed {seed}")
    each: list[dict[str, Any]] = []
    for _ in range(3):
        schema = StructuredOutputs(json_schema=random_schema(rng))
        each += [{}, {"structured_outputs": schema}, {"repetition_penalty": 1.3, "logprobs": 1}]
        each += [{"structured_outputs": StructuredOutputs(regex="[a-c]{3,30}"), "min_tokens": 4}]
        each += [{"bad_words": ["yes"], "allowed_token_ids": rng.sample(range(200), k=40)}]
    prompts = [rng.choices(range(1, 200), k=rng.randint(1, 9)) for _ in each]
    params = [
        SamplingParams(max_tokens=30, temperature=rng.choice([0.0, 1.0]), seed=at, **one)
        for at, one in enumerate(each)
    ]
    alone, batch = load(speaking, max_batch_size=1), load(speaking, overlap=overlap)
    for one in (alone, batch):
        in_double(one.engine)
    expected = [output.token_ids for output in alone.generate(prompts, params)]
    assert [output.token_ids for output in batch.generate(prompts, params)] == expected
    assert (batch.stats.steps_ahead > 20) is overlap


def test_vllms_name_for_a_schema(llm: LLM) -> None:
    wanted = StructuredOutputs(json={"const": 7})
    assert texts(llm, [wanted], 1) == ["7"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"regex": "(["}, "not understood"),
        ({"json_schema": {"type": "no such type"}}, "not understood"),
        ({"json_schema": "{"}, "not understood"),
        ({"grammar": "start: nothing"}, "not understood"),
        ({"regex": "a" * 300_000}, "300,000 bytes|bytes"),
    ],
)
def test_what_is_no_constraint_is_refused(llm: LLM, wrong: dict[str, Any], words: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**wrong))
    with pytest.raises(UsageError, match=words):
        llm.generate(["yes"], params)
    assert not llm.engine.scheduler.busy


@pytest.mark.parametrize("several", [{}, {"regex": "a", "choice": ["b"]}])
def test_one_constraint_is_given(several: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="nothing, or several"):
        StructuredOutputs(**several)


def test_an_answer_that_is_not_followed_to_its_end_is_none(llm: LLM) -> None:
    """Of 700 properties in any number the parser keeps no account any more: that is no "stop"."""
    schema = {
        "type": "object",
        "properties": {f"p{number}": {"type": "null"} for number in range(700)},
        "required": ["p699"],
        "additionalProperties": False,
    }
    structure = StructuredOutputs(json_schema=schema)
    [output] = llm.generate(["a"], SamplingParams(structured_outputs=structure, max_tokens=400))
    assert output.finish_reason == "length"
    assert len(output.token_ids) < 400
