"""Clients name adapters as models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from onboard.cli import main
from onboard.errors import UsageError
from onboard.runtime.tokenizer import Tokenizer
from onboard.serve.serve_settings import ServeSettings
from onboard.serve.server import check_names
from tests.support.runtime.adapters import Adapter, make_adapter
from tests.support.runtime.tiny import Tiny
from tests.support.serving import served, speaking_model

PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return speaking_model(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module")
def adapters(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "cats": make_adapter(folder / "cats", model, ["q_proj", "v_proj"]),
        "team/dogs": make_adapter(folder / "dogs", model, ["up_proj", "down_proj"], 7),
    }


@pytest.fixture(scope="module")
def address(model: Tiny, adapters: dict[str, Adapter]) -> Iterator[str]:
    folders = {name: str(each.folder) for name, each in adapters.items()}
    with served(model, lora=folders) as (address, _):
        yield address


def post(address: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{address}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def completed(address: str, name: str) -> dict[str, Any]:
    asked = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 0}
    return post(address, "/v1/completions", **asked)


def test_models_are_listed_with_their_parent(address: str) -> None:
    found = httpx.get(f"{address}/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in found] == [
        ("tiny", None),
        ("cats", "tiny"),
        ("team/dogs", "tiny"),
    ]
    one = httpx.get(f"{address}/v1/models/team/dogs").json()
    assert (one["id"], one["parent"]) == ("team/dogs", "tiny")


def test_each_client_has_the_adapter_that_it_names(
    address: str, model: Tiny, adapters: dict[str, Adapter]
) -> None:
    names = ["cats", "tiny", "team/dogs", "cats"] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: completed(address, name), names))
    ids = post(address, "/tokenize", prompt=PROMPT)["tokens"]
    for name, answer in zip(names, answers, strict=True):
        source = adapters.get(name, model)
        greedy = source.greedy(ids, 8)
        text = post(address, "/detokenize", tokens=greedy[: greedy.sure])["prompt"]
        assert answer["model"] == name
        assert answer["choices"][0]["text"].startswith(text)


def test_conversations_and_vectors_have_it_too(address: str, adapters: dict[str, Adapter]) -> None:
    said = {"messages": [{"role": "user", "content": "the dog"}], "temperature": 0}
    texts = {
        name: post(address, "/v1/chat/completions", model=name, max_tokens=8, **said)
        for name in ("tiny", "cats")
    }
    assert texts["tiny"]["choices"] != texts["cats"]["choices"]
    ids = post(address, "/tokenize", prompt=PROMPT)["tokens"]
    with torch.no_grad():
        states = adapters["cats"].hf.model(torch.tensor([ids])).last_hidden_state[0, -1]
    found = post(address, "/v1/embeddings", model="cats", input=PROMPT)["data"][0]["embedding"]
    torch.testing.assert_close(torch.tensor(found), states / states.norm(), rtol=1e-4, atol=1e-5)


def test_a_client_names_no_other_and_no_file(address: str, adapters: dict[str, Adapter]) -> None:
    for name in ("dogs", str(adapters["cats"].folder), "../cats"):
        body = {"model": name, "prompt": PROMPT, "lora": str(adapters["cats"].folder)}
        answer = httpx.post(f"{address}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_field_of_the_body_chooses_no_adapter(address: str) -> None:
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 0}
    other = post(address, "/v1/completions", model="tiny", lora="cats", **asked)
    assert other["choices"] == completed(address, "tiny")["choices"]


def test_an_adapter_is_not_called_as_its_model() -> None:
    with pytest.raises(UsageError, match="both called 'tiny'"):
        check_names(ServeSettings(names=["tiny"]), ["cats", "tiny"])


def run(model: Tiny, *options: str) -> int:
    base = ["run", str(model.checkpoint), "--root", str(model.root), "--device", "cpu"]
    return main.run([*base, *options])


def test_run_has_them(
    model: Tiny,
    adapters: dict[str, Adapter],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [f"--lora={name}={each.folder}" for name, each in adapters.items()]
    most = ["--max-tokens=6", "--json"]
    assert run(model, "--token-ids=5,6,7", *most, named[0]) == 0
    output = json.loads(capsys.readouterr().out)["outputs"][0]["outputs"][0]
    assert output["token_ids"] == adapters["cats"].greedy([5, 6, 7], 6)
    assert run(model, "--token-ids=5,6,7", *most, *named) == 2
    assert "one adapter" in capsys.readouterr().err
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "logprobs": 0}
    lines = [{**asked, "model": name} for name in adapters]
    requests.write_text("\n".join(map(json.dumps, lines)))
    assert run(model, f"--input={requests}", f"--output={answers}", *named) == 0
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    texts = {each["response"]["body"]["model"]: each for each in records}
    tokenizer = Tokenizer.load(model.checkpoint)
    assert tokenizer is not None
    for name, each in adapters.items():
        greedy = each.greedy([5, 6, 7], 6)
        text = texts[name]["response"]["body"]["choices"][0]["text"]
        assert text.startswith(tokenizer.decode(greedy[: greedy.sure]))


@pytest.mark.parametrize("given", ["cats", "=x", "cats=", "a b=x", "cats=/nowhere"])
def test_what_names_no_adapter_is_one_line(
    model: Tiny, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "--token-ids=5", f"--lora={given}") == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "adapter" in error
