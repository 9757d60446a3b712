"""Scores are those of transformers' logits, and of the harness's own back end where it is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from onboard import LLM
from onboard.cli import main
from onboard.cli.commands.measure import score_tasks as command
from onboard.cli.documents import EvalDocument
from onboard.errors import UsageError
from onboard.evaluation.continuation_scores import continuation_scores
from tests.support.runtime.tiny import Tiny, make_tiny

DEMO = Path(__file__).resolve().parents[3] / "onboard" / "assets" / "demo"
NEEDED = ("lm_eval", "datasets", "accelerate", "peft")
HARNESS = all(importlib.util.find_spec(name) for name in NEEDED)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("scores"), own_file=False)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> LLM:
    return LLM(tiny.checkpoint, root=tiny.root, device="cpu", dtype="float32")


@pytest.mark.parametrize(("before", "after", "longest"), [(9, 3, 64), (1, 1, 64), (20, 4, 8)])
def test_a_score_is_that_of_transformers(
    tiny: Tiny, llm: LLM, before: int, after: int, longest: int
) -> None:
    seed = random.randrange(2**31)
    print(f"tokens seed {seed}")
    draw = random.Random(seed)
    context, continuation = (
        [draw.randrange(3, 97) for _ in range(count)] for count in (before, after)
    )
    given = [*context, *continuation][-(longest + 1) :]
    logprobs = tiny.logits(given[:-1])[-after:].double().log_softmax(-1)
    expected = sum(float(row[token]) for row, token in zip(logprobs, continuation, strict=True))
    [(score, is_greedy)] = continuation_scores(llm, [(context, continuation)], longest)
    assert score == pytest.approx(expected, abs=1e-4)
    assert is_greedy == (logprobs.argmax(-1).tolist() == continuation)
    best = tiny.greedy(context[-longest:], 1)
    assert continuation_scores(llm, [(context, best)], longest)[0][1]


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_continuations_that_run_together_have_the_scores_that_each_has_alone(
    family: str, tiny: Tiny, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family != "llama":
        tiny = make_tiny(tmp_path, family, own_file=False)
        llm = LLM(tiny.checkpoint, root=tiny.root, device="cpu", dtype="float32")
    seed = random.randrange(2**31)
    print(f"tokens seed {seed}")
    draw = random.Random(seed)
    lengths = [(draw.randint(1, 40), draw.randint(1, 5)) for _ in range(19)]
    asked = [
        ([draw.randrange(3, 97) for _ in range(a)], [draw.randrange(3, 97) for _ in range(b)])
        for a, b in lengths
    ]
    steps: list[int] = []
    logits = llm.engine.cache.logits
    monkeypatch.setattr(llm.engine.cache, "logits", lambda gm: steps.append(1) or logits(gm))
    together = continuation_scores(llm, asked, 48)
    assert len(steps) < len(asked) / 3 if family == "llama" else len(steps) >= len(asked)
    for (context, wanted), (score, _) in zip(asked, together, strict=True):
        rows = tiny.logits([*context, *wanted][:-1])[-len(wanted) :].double().log_softmax(-1)
        expected = sum(float(row[token]) for row, token in zip(rows, wanted, strict=True))
        assert score == pytest.approx(expected, rel=1e-4, abs=1e-3)
        [(alone, _)] = continuation_scores(llm, [(context, wanted)], 48)
        assert score == pytest.approx(alone, rel=1e-5, abs=1e-4)


def test_what_has_no_score_is_refused(llm: LLM) -> None:
    for context, continuation in (([], [1]), ([1], []), ([1], [1] * 9)):
        with pytest.raises(UsageError, match="have no score"):
            continuation_scores(llm, [(context, continuation)], 8)


def test_what_is_missing_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    for name in ("harness_run", "harness_model"):
        monkeypatch.delitem(__import__("sys").modules, f"onboard.evaluation.{name}", raising=False)
    assert main.run(["eval", str(DEMO), "--task", "x"]) == UsageError.exit_code
    assert "pip install 'onboard[eval]'" in capsys.readouterr().err


def _tasks(folder: Path) -> list[str]:
    """Write a task of each kind; return their files."""
    rows = [
        {"q": "Once upon a time, there was a", "a": " little girl", "b": " big stone", "l": 0},
        {"q": "The cat sat on the", "a": " mat", "b": " dog", "l": 0},
        {"q": "Tom was happy because", "a": " he played", "b": " it was a ball", "l": 1},
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}},
        "test_split": "test",
    }
    choice = {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_target": "{{l}}"}
    choice |= {"doc_to_choice": ["{{a}}", "{{b}}"], "metric_list": [{"metric": "acc"}]}
    whole = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}{{a}}",
    }
    whole |= {"metric_list": [{"metric": "bits_per_byte"}]}
    text = {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    text |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 20}}
    text |= {"metric_list": [{"metric": "exact_match"}]}
    files = []
    for name, own in (("choice", choice), ("whole", whole), ("text", text)):
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps({"task": f"own_{name}", **data, **own}))
        files.append(str(path))
    return files


@pytest.mark.skipif(not HARNESS, reason="needs lm-eval[hf], the extra eval")
def test_each_item_is_answered_as_the_harness_answers_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    files = [word for path in _tasks(tmp_path) for word in ("--task", path)]
    words = ["eval", str(DEMO), "--root", str(tmp_path), *files, "--device", "cpu", "--json"]
    more = ["--dtype", "float32", "--compare"]
    assert main.run([*words, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    EvalDocument.model_validate(found)
    assert found["items"] == {"own_choice": 3, "own_whole": 3, "own_text": 3}
    assert not any(found["differences"].values())
    logits = LLM.last_logits
    monkeypatch.setattr(
        LLM, "last_logits", lambda llm, *given: [each * 1.01 for each in logits(llm, *given)]
    )
    assert main.run([*words, *more]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differences"]["own_choice"] == [0, 1, 2]
    assert found["differences"]["own_text"] == []


@pytest.mark.skipif(not HARNESS, reason="needs lm-eval[hf], the extra eval")
def test_prompts_are_written_by_the_chat_template(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onboard.evaluation.harness_model import HarnessModel

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    checkpoint = shutil.copytree(DEMO, tmp_path / "checkpoint")
    template = "{% for m in messages %}Once, {{ m.content }}{% endfor %}"
    (checkpoint / "chat_template.jinja").write_text(template)
    choice, _, text = _tasks(tmp_path)
    words = ["eval", str(checkpoint), "--root", str(tmp_path), "--device", "cpu", "--json"]
    words += ["--dtype", "float32", "--task", choice, "--task", text]
    written: list[str] = []
    write = HarnessModel.apply_chat_template

    def watched(*args: Any, **options: Any) -> str:
        written.append(write(*args, **options))
        return written[-1]

    monkeypatch.setattr(HarnessModel, "apply_chat_template", watched)
    assert main.run([*words, "--chat", "--compare"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["items"] == {"own_choice": 3, "own_text": 3}
    assert not any(found["differences"].values()), "transformers' back end has the same texts"
    assert "Once, The cat sat on the" in written
    written.clear()
    assert main.run(words) == 0
    assert not written


def test_items_that_differ_are_an_error(capsys: Capture) -> None:
    found: dict[str, Any] = {"tasks": {"t": {"acc": 0.5}}, "hf": {"t": {"acc": 0.75}}}
    found |= {"items": {"t": 4}, "differences": {"t": [2]}}
    result = command._told(found, as_json=True)
    assert result is not None
    assert "item 2 of t differs from transformers'" in str(result.error)
    with pytest.raises(Exception, match="item 2 of t"):
        command._told(found, as_json=False)
    assert capsys.readouterr().out == "t acc 0.5 (hf: 0.75)\n3 of 4 items alike\n"
    assert command._told({**found, "differences": {"t": []}}, as_json=False) is None
