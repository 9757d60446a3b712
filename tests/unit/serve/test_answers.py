"""Answers as families of models write them, cut into pieces at random, are read alike."""

from __future__ import annotations

import json
import random

import pytest

from onboard.serve.answers.answer_pieces import Answer
from onboard.serve.answers.answering import ForcedCalls
from onboard.serve.answers.call_pieces import GrowingObject
from onboard.serve.answers.formats import (
    CHANNELS,
    FENCED_JSON,
    LISTED_JSON,
    NAMED_JSON,
    PLAIN,
    TAGGED_JSON,
    TAGGED_PARAMETERS,
    Format,
    bare_json,
    format_of,
)
from onboard.serve.answers.reader import AnswerReader

WEATHER = {"city": "Zürich", "days": 3}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
ARGUMENTS = json.dumps(WEATHER, ensure_ascii=False)
ONE = [("weather", WEATHER)]
TWO = [("weather", WEATHER), ("time", {})]
BARE = bare_json(["weather", "time"])
CASES: dict[str, tuple[Format, str, str, str, str, list[tuple[str, object]]]] = {
    # how it is written; the turn's beginning; what the model writes; thoughts, text, calls
    "hermes": (
        TAGGED_JSON,
        "<|im_start|>assistant\n",
        f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        "",
        "Let me look.",
        TWO,
    ),
    "qwen3 thinks": (
        TAGGED_JSON,
        "<|im_start|>assistant\n<think>\n",
        "Is it <b>cold</b>?\n</think>\n\nYes, 3 < 4.",
        "Is it <b>cold</b>?",
        "Yes, 3 < 4.",
        [],
    ),
    "qwen3 does not think": (
        TAGGED_JSON,
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Yes.",
        "",
        "Yes.",
        [],
    ),
    "qwen coder": (
        TAGGED_PARAMETERS,
        "<|im_start|>assistant\n",
        "I call.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "",
        "I call.",
        ONE,
    ),
    "llama": (
        BARE,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}<|eot_id|>',
        "",
        "",
        ONE,
    ),
    "llama writes JSON of its own": (
        BARE,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        'As JSON: {"name": "Rex", "age": 3}',
        "",
        'As JSON: {"name": "Rex", "age": 3}',
        [],
    ),
    "mistral": (
        LISTED_JSON,
        "[/INST]",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "time", "arguments": {}}]',
        "",
        "",
        TWO,
    ),
    "mistral of 2025": (
        NAMED_JSON,
        "[/INST]",
        f"Now.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}",
        "",
        "Now.",
        TWO,
    ),
    "deepseek": (
        FENCED_JSON,
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "",
        TWO,
    ),
    "deepseek of 2025 thinks": (
        FENCED_JSON,
        "<｜Assistant｜><think>",
        f"Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        "I look.",
        ONE,
    ),
    "harmony": (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "Hm.",
        "",
        ONE,
    ),
    "harmony answers": (
        CHANNELS,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is cold.<|return|>",
        "Hm.",
        "It is cold.",
        [],
    ),
    "harmony, the recipient first": (
        CHANNELS,
        "<|start|>assistant",
        f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "",
        "",
        ONE,
    ),
    "plain": (PLAIN, "\nASSISTANT: ", "2 < 3 and [a] {b}\n", "", "2 < 3 and [a] {b}\n", []),
    "a call that is no JSON": (
        TAGGED_JSON,
        "<|im_start|>assistant\n",
        "<tool_call>{name: weather}</tool_call>",
        "",
        "{name: weather}",
        [],
    ),
    "a call that breaks off": (
        TAGGED_JSON,
        "<|im_start|>assistant\n",
        'So <tool_call>{"name": "wea',
        "",
        'So{"name": "wea',
        [],
    ),
    "a list of calls that is none": (
        LISTED_JSON,
        "[/INST]",
        "[TOOL_CALLS] [weather]",
        "",
        "[weather]",
        [],
    ),
}


def reader_of(shape: Format, turn: str, in_pieces: bool) -> AnswerReader:
    removed = ["<|eot_id|>", "<|im_end|>", "</s>"]
    prompt = "<user>the weather?" + turn
    return AnswerReader(shape, prompt, turn, TOOLS, removed, in_pieces=in_pieces)


def read(shape: Format, turn: str, pieces: list[str], in_pieces: bool = False) -> Answer:
    reader, answer = reader_of(shape, turn, in_pieces), Answer()
    for text in pieces:
        for piece in reader.feed(text):
            answer.add(piece)
    for piece in reader.end():
        answer.add(piece)
    return answer


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_answers_are_read_however_they_are_cut(name: str, in_pieces: bool) -> None:
    shape, turn, written, thoughts, text, calls = CASES[name]
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cuts = [[written], list(written)]
    for _ in range(20):
        places = sorted(rng.sample(range(len(written) + 1), k=min(6, len(written))))
        pairs = zip([0, *places], [*places, len(written)], strict=True)
        cuts.append([written[start:end] for start, end in pairs])
    for pieces in cuts:
        answer = read(shape, turn, pieces, in_pieces)
        assert (answer.reasoning, answer.text) == (thoughts, text)
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
        assert [call.number for call in answer.calls] == list(range(len(calls)))


LONG = json.dumps({"city": 'a "quoted" {brace} \\ and \n' * 9, "days": [1, {"a": {}}]})
WRITTEN = {
    # how it is written; the mark before the arguments, and what comes behind them
    "hermes": (TAGGED_JSON, '<tool_call>\n{"name": "weather", "arguments": ', "}\n</tool_call>"),
    "llama": (BARE, '{"name": "weather", "parameters": ', "}<|eot_id|>"),
    "mistral": (NAMED_JSON, "[TOOL_CALLS]weather[ARGS]", "</s>"),
    "deepseek": (
        FENCED_JSON,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "harmony": (
        CHANNELS,
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        "<|call|>",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_arguments_are_told_as_they_are_written(name: str) -> None:
    shape, before, behind = WRITTEN[name]
    reader, answer, told = reader_of(shape, "", True), Answer(), []
    for text in [*before, *LONG]:
        for piece in reader.feed(text):
            answer.add(piece)
        told.append(answer.calls[0].arguments if answer.calls else "")
    for place in range(60, len(LONG), 20):
        so_far = told[len(before) + place]
        assert LONG.startswith(so_far)
        assert place - len(so_far) < 40, "it came late"
    for piece in reader.feed(behind):
        answer.add(piece)
    for piece in reader.end():
        answer.add(piece)
    assert [(call.name, call.arguments) for call in answer.calls] == [("weather", LONG)]
    assert not answer.text
    # A call that is cut off has as much as there is
    cut = read(shape, "", [before, LONG[:100]], in_pieces=True)
    assert [(call.name, call.arguments) for call in cut.calls] == [("weather", LONG[:100])]
    # and what is written behind a call, but within its marks, is text
    odd = read(shape, "", [before, LONG, " And more.", behind], in_pieces=True)
    assert (odd.calls[0].arguments, odd.text.rstrip("}")) == (LONG, " And more.")


@pytest.mark.parametrize("shape", [TAGGED_JSON, BARE])
@pytest.mark.parametrize("written", ['{"arguments": {}, "name": "time"}', '{"name": "time"}'])
def test_a_call_that_begins_in_another_way_comes_whole(shape: Format, written: str) -> None:
    if shape is BARE and written.startswith('{"arg'):
        return  # nothing marks it
    marks = ("<tool_call>", "</tool_call>") if shape is TAGGED_JSON else ("", "<|eot_id|>")
    answer = read(shape, "", [marks[0], *written, marks[1]], in_pieces=True)
    assert [(call.name, call.arguments) for call in answer.calls] == [("time", "{}")]


def test_an_object_ends_where_json_ends_it() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def value(depth: int) -> object:
        if depth and rng.random() < 0.6:
            some = [value(depth - 1) for _ in range(rng.randrange(3))]
            return some if rng.random() < 0.5 else {random_text(): each for each in some}
        return rng.choice([1, None, random_text()])

    def random_text() -> str:
        return "".join(rng.choice('{}[]"\\ ab\n') for _ in range(rng.randrange(6)))

    for _ in range(300):
        text = json.dumps({random_text(): value(4)})
        whole, growing, found = text + rng.choice(["", "}", " {", "x"]), GrowingObject(), ""
        while whole:
            size = rng.randint(1, 9)
            found, whole = found + growing.more(whole[:size]), whole[size:]
        assert found == text


@pytest.mark.parametrize("in_pieces", [True, False])
def test_required_calls_are_told_as_they_come_and_as_far(in_pieces: bool) -> None:
    arguments = [{"city": 'a } ] { "\\', "days": [{}, 1]}, {}, {"x": {"y": [None]}}]
    space = random.choice([None, 1])
    calls = [{"name": f"n{number}", "parameters": each} for number, each in enumerate(arguments)]
    whole = json.dumps(calls, indent=space)
    ends = [whole.index(f"n{number}") for number in (1, 2)]

    def told(text: str) -> Answer:
        answer, reader, place = Answer(), ForcedCalls(None, in_pieces=in_pieces), 0
        while place < len(text):
            size = random.randint(1, 9)
            for piece in reader.feed(text[place : place + size]):
                answer.add(piece)
            place += size
        before = len(answer.calls)
        for piece in reader.end():
            answer.add(piece)
        assert before == (len(answer.calls) if in_pieces else 0)
        return answer

    found = told(whole)
    assert [json.loads(call.arguments) for call in found.calls] == arguments
    assert [(call.number, call.name) for call in found.calls] == [(n, f"n{n}") for n in range(3)]
    for count, end in enumerate(ends, 1):
        cut = told(whole[: end + 2])
        assert [json.loads(call.arguments) for call in cut.calls] == arguments[:count]
        assert not cut.text
    cut = whole[: whole.index("days")]
    begun = told(cut)
    written = cut[cut.index("{", cut.index("parameters")) :]
    assert [call.arguments for call in begun.calls] == [written] * in_pieces
    assert begun.text == ("" if in_pieces else cut)
    assert told("[").text == "["


@pytest.mark.parametrize(
    ("template", "vocabulary", "expected"),
    [
        ("... <tool_call>\n{...}", {}, TAGGED_JSON),
        ("... <tool_call>\n<function=...", {}, TAGGED_PARAMETERS),
        ("", {"<tool_call>": 7}, TAGGED_JSON),
        ("[TOOL_CALLS] [", {}, LISTED_JSON),
        ("[TOOL_CALLS]name[ARGS]", {}, NAMED_JSON),
        ("[INST]", {"[TOOL_CALLS]": 5, "[ARGS]": 6}, NAMED_JSON),
        ("<｜tool▁calls▁begin｜>", {}, FENCED_JSON),
        ("<|start|>assistant<|channel|>final", {}, CHANNELS),
        ("<|im_start|>assistant", {}, PLAIN),
    ],
)
def test_marks_decide_how_a_model_writes(
    template: str, vocabulary: dict[str, int], expected: Format
) -> None:
    assert format_of(template, vocabulary) is expected


def test_special_tokens_are_not_shown() -> None:
    assert read(PLAIN, "", ["It is", "<|eot_id|>", " so."]).text == "It is so."


def test_without_a_shape_all_is_text() -> None:
    reader = AnswerReader(None, "p", "")
    written = "<think>no</think><tool_call>{}</tool_call>"
    assert [piece.text for piece in reader.feed(written)] == [written]
    assert list(reader.end()) == []
