"""`onboard kld`, on tiny checkpoints."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard.cli import main
from onboard.cli.documents import KldDocument
from onboard.runtime.tokenizer import Tokenizer
from onboard.verify.divergence import divergence, side
from onboard.verify.divergence.text_windows import Source, text_source, windows
from tests.support.checkpoints import save_tokenizer
from tests.support.quantised import FOLDER
from tests.support.runtime.tiny import Tiny

Capture = pytest.CaptureFixture[str]


def kld(capsys: Capture, a: object, b: object, root: Path, *words: object, code: int = 0) -> Any:
    """Run the command; return its document."""
    capsys.readouterr()
    options = ["--root", root, "--device", "cpu", "--json", *words]
    assert main.run(["kld", str(a), str(b), *map(str, options)]) == code
    found = json.loads(capsys.readouterr().out)
    if "mean" in found:
        KldDocument.model_validate(found)
    return found


def changed(llama: Tiny, folder: Path) -> Path:
    """A copy of the checkpoint whose head is a little another."""
    shutil.copytree(llama.checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] += 0.05 * torch.randn_like(weights["lm_head.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_each_token_is_predicted_once() -> None:
    tokens = list(range(100, 111))
    bare = windows(Source("x", tokens), 8, 3)
    assert [each.ids for each in bare] == [[100, 101, 102], [103, 104, 105], [106, 107]]
    assert [token for each in bare for token in each.targets] == tokens[1:9]
    begun = windows(Source("x", tokens, (0, 1)), 8, 3)
    assert [each.ids for each in begun] == [[0, 1, 100, 101], [0, 1, 103, 104], [0, 1, 106]]
    assert [token for each in begun for token in each.targets] == tokens[:8]
    assert windows(Source("x", [5]), 8, 3) == []
    whole = windows(Source("x", tokens), 99, 99)
    assert [(each.ids, each.targets) for each in whole] == [(tokens[:-1], tokens[1:])]


def test_a_window_begins_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    save_tokenizer(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a cat")
    plain = text_source(tmp_path, text)
    assert plain is not None
    assert plain.prefix == ()
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    tokenizer.hf.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.hf.save_pretrained(tmp_path)
    begun = text_source(tmp_path, text)
    assert begun is not None
    assert (begun.prefix, begun.tokens) == ((1,), plain.tokens)


def test_the_same_model_is_nothing_away(llama: Tiny, capsys: Capture) -> None:
    found = kld(capsys, llama.checkpoint, llama.checkpoint, llama.root, "--tokens", 70, "--seed", 5)
    assert (found["mean"], found["largest"], found["top1"], found["top5"]) == (0, 0, 1, 1)
    assert found["perplexity_a"] == found["perplexity_b"]
    assert (found["seed"], found["text"], found["tokens"]) == (5, "random tokens", 70)
    assert found["window"] == 128
    assert found["facts"] == ["windows have 128 tokens: the models read no more"]


def test_figures_are_those_of_transformers_logits(
    llama: Tiny, tmp_path: Path, capsys: Capture
) -> None:
    other = changed(llama, tmp_path / "other")
    words = ("--tokens", 50, "--window", 16, "--seed", 3, "--max-mean", 100)
    found = kld(capsys, f"transformers:{llama.checkpoint}", other, llama.root, *words)

    assert found["passed"] is True
    seen = divergence.random_source(llama.hf.config, 50, 3).tokens
    head = load_file(other / "model.safetensors")["lm_head.weight"].double()
    divergences, losses = [], []
    for start in range(0, 50, 16):
        ids = seen[start : min(start + 16, 50)]
        with torch.no_grad():
            hidden = llama.hf.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        a = llama.logits(ids).double().log_softmax(-1)
        b = (hidden.double() @ head.T).log_softmax(-1)
        divergences += (a.exp() * (a - b)).sum(-1).tolist()
        losses += [-float(b[at, seen[start + at + 1]]) for at in range(len(ids))]
    assert len(divergences) == 50
    assert found["mean"] == pytest.approx(sum(divergences) / 50, rel=1e-4)
    assert found["largest"] == pytest.approx(max(divergences), rel=1e-4)
    assert found["perplexity_b"] == pytest.approx(
        float(torch.tensor(losses).mean().exp()), rel=1e-4
    )
    assert found["mean"] > 1e-3


def test_settings_are_of_one_side(llama: Tiny, capsys: Capture) -> None:
    words = ("--tokens", 40, "--set-b", "dtype=bfloat16", "--set-b", "max_seq_len=16")
    found = kld(capsys, llama.checkpoint, llama.checkpoint, llama.root, *words)
    assert (found["a"]["dtype"], found["b"]["dtype"], found["window"]) == (
        "float32",
        "bfloat16",
        16,
    )
    assert found["b"]["settings"] == {"device": "cpu", "dtype": "bfloat16", "max_seq_len": 16}
    assert 0 < found["mean"] < 0.05


def test_a_mean_above_the_limit_is_exit_code_1(
    llama: Tiny, tmp_path: Path, capsys: Capture
) -> None:
    other = changed(llama, tmp_path / "other")
    words = ("--tokens", 20, "--seed", 1, "--max-mean")
    found = kld(capsys, llama.checkpoint, other, llama.root, *words, 1e-9, code=1)
    assert found["passed"] is False
    assert found["error"]["message"].endswith("above 1e-09")
    text = ["kld", llama.checkpoint, other, "--root", llama.root, *words, 1e-9]
    assert main.run([str(word) for word in text]) == 1
    assert "FAILED: the mean KL divergence is" in capsys.readouterr().out


def test_other_vocabularies_are_refused_before_a_model_is_read(
    llama: Tiny,
    tiny: Callable[..., Tiny],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(side.Side, "opened", None)
    other = tiny(vocab_size=98)
    found = kld(capsys, llama.checkpoint, f"transformers:{other.checkpoint}", llama.root, code=2)
    assert found["error"]["message"] == ("A has 97 tokens in its vocabulary and B has 98")


def test_texts_that_are_none(llama: Tiny, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(llama.checkpoint, checkpoint)
    text = tmp_path / "text.txt"
    text.write_bytes(b"a\xff")

    def refused(folder: Path) -> str:
        words = ("--text", text)
        found = kld(capsys, folder, folder, llama.root, *words, code=2)
        return str(found["error"]["message"])

    assert "no tokenizer" in refused(checkpoint)
    save_tokenizer(checkpoint)
    assert refused(checkpoint) == f"{text} is not UTF-8"
    text.write_text("\n ")
    assert refused(checkpoint) == f"{text} has no text"
    text.write_text("a")
    assert "has one token" in refused(checkpoint)
    text.write_text("the old man walked")
    found = kld(capsys, checkpoint, checkpoint, llama.root, "--text", text)
    assert (found["tokens"], found["seed"], found["text"]) == (17, None, str(text))
    assert found["facts"][0] == "tokens of the text: 17, not 2,048"


def test_the_first_model_is_gone_when_the_second_is_loaded(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []

    def watched(build: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **options: Any) -> Any:
            assert [each() for each in alive] == [None] * len(alive)
            made = build(*args, **options)
            # transformers' models are part of cycles, as the copy here is
            made.itself = made
            alive.append(weakref.ref(made))
            return made

        return load

    monkeypatch.setattr(side, "LLM", watched(side.LLM))
    monkeypatch.setattr(side, "load_model", watched(side.load_model))
    ours = side.Side("ours", str(llama.checkpoint), llama.root, {"device": "cpu"})
    theirs = replace(ours, name="theirs", by_transformers=True)
    gc.disable()
    try:
        divergence.measure(ours, theirs, tokens=8)
        divergence.measure(theirs, ours, tokens=8)
    finally:
        gc.enable()
    assert len(alive) == 4


def test_a_quantised_checkpoint_as_both_run_it(capsys: Capture) -> None:
    folder = FOLDER / "hf_fp8_llama"
    root = Path(__file__).resolve().parents[3]
    found = kld(capsys, f"transformers:{folder}", folder, root, "--tokens", 64, "--seed", 2)
    assert found["mean"] < 1e-9
    assert found["perplexity_a"] == pytest.approx(found["perplexity_b"], rel=1e-5)
    assert any("decoded as they are read" in fact for fact in found["b"]["facts"])
