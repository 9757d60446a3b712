"""`onboard run --input`: each request has its answer once, whatever interrupts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from onboard import LLM, SamplingParams
from onboard.cli import main
from tests.support.runtime.tiny import Tiny
from tests.support.serving import speaking_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return speaking_model(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module")
def llm(model: Tiny) -> LLM:
    return LLM(model.checkpoint, root=model.root, device="cpu", dtype="float32")


def run(model: Tiny, requests: Path, answers: Path, *words: object) -> int:
    command = ["run", model.checkpoint, "--root", model.root, "--device", "cpu"]
    command += ["--dtype", "float32", "--max-tokens", 6, "--input", requests, "--output", answers]
    return main.run([str(each) for each in [*command, *words]])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_every_kind_of_line(model: Tiny, llm: LLM, tmp_path: Path, capsys: Capture) -> None:
    """Expected: what `LLM` gives for the same text; refused lines stand beside the others."""
    talk = [{"role": "user", "content": "the cat"}]
    given = {"model": model.checkpoint.name, "messages": talk, "max_tokens": 3}
    lines = [
        "the dog",
        {"prompt": "the mat", "custom_id": "mine", "max_tokens": 2},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": given},
        {"custom_id": "b", "method": "POST", "url": "/v1/nothing", "body": {}},
        {"messages": talk, "temperature": -1},
        [1, 2],
    ]
    requests = write(tmp_path / "in.jsonl", *lines)
    with requests.open("a") as file:
        file.write("\n{no json\n")
    answers = tmp_path / "out.jsonl"
    assert run(model, requests, answers, "--system", "on the mat") == 1
    found = {each["custom_id"]: each for each in records(answers)}
    assert list(sorted(found)) == ["a", "b", "line-1", "line-5", "line-6", "line-8", "mine"]
    assert {key: each["response"]["status_code"] for key, each in found.items()} == {
        "line-1": 200, "mine": 200, "a": 200, "b": 400, "line-5": 400, "line-6": 400, "line-8": 400,
    }  # fmt: skip

    def text(prompt: Any, count: int) -> str:
        params = SamplingParams(temperature=0.0, max_tokens=count)
        return llm.generate([prompt], params)[0].text

    bodies = {key: each["response"]["body"] for key, each in found.items()}
    assert bodies["line-1"]["choices"][0]["text"] == text("the dog", 6)
    assert bodies["mine"]["choices"][0]["text"] == text("the mat", 2)
    written = llm.engine.tokenizer.encode_plain("<system>on the mat<user>the cat<assistant>")
    assert bodies["a"]["usage"]["prompt_tokens"] == len(written)
    assert bodies["a"]["choices"][0]["message"]["content"] == text(written, 3)
    assert "temperature" in bodies["line-5"]["error"]["message"]
    assert "7 requests, 7 done, 4 refused" in capsys.readouterr().err


def test_a_second_run_answers_what_is_left(model: Tiny, tmp_path: Path, capsys: Capture) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    requests = write(tmp_path / "in.jsonl", *(f"the {n} cat" for n in range(12)))
    answers = tmp_path / "out.jsonl"
    assert run(model, requests, answers) == 0
    whole = records(answers)
    assert len(whole) == 12
    lines = answers.read_bytes().splitlines(keepends=True)
    kept, cut = lines[: rng.randrange(1, 11)], lines[-1][: rng.randrange(1, 20)]
    failed = json.loads(lines[len(kept)])
    failed["response"]["status_code"] = 500  # not the request's fault: it is tried again
    answers.write_bytes(b"".join([*kept, json.dumps(failed).encode() + b"\n", cut]))
    assert run(model, requests, answers) == 0
    again = records(answers)
    assert answers.read_bytes().startswith(b"".join(kept))
    texts = [
        {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}
        for found in (whole, again)
    ]
    assert texts[0] == texts[1]
    assert len(again) == 12
    assert f"12 done ({len(kept)} before)" in capsys.readouterr().err
    before = answers.read_bytes()
    assert run(model, requests, answers) == 0
    assert answers.read_bytes() == before


def test_answers_to_other_requests_are_kept(model: Tiny, tmp_path: Path, capsys: Capture) -> None:
    requests, answers = write(tmp_path / "in.jsonl", "the cat"), tmp_path / "out.jsonl"
    assert run(model, requests, answers) == 0
    before = answers.read_bytes()
    assert run(model, requests, answers, "--temperature", 1) == 2, "other settings"
    assert run(model, write(tmp_path / "in.jsonl", "the dog"), answers) == 2
    assert "is no answer to these requests" in capsys.readouterr().err
    assert answers.read_bytes() == before
    assert run(model, requests, requests) == 2
    assert run(model, write(tmp_path / "empty"), tmp_path / "new") == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--input", "in"], "go together"),
        (["--chat", "-n", "2"], "--chat goes with neither"),
        (["--system", "x", "the cat"], "--system is for conversations"),
        (["--input", "none", "--output", "out"], "is no file"),
        (["--input", "in", "--output", "out", "--json"], "goes with neither"),
    ],
)
def test_what_does_not_go_together(words: list[str], said: str, capsys: Capture) -> None:
    assert main.run(["run", "nowhere", *words]) == 2
    assert said in capsys.readouterr().err + capsys.readouterr().out
