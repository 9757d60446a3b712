"""What libraries print of hostile files does not reach a terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from onboard.runtime.tokenizer import Tokenizer
from onboard.untrusted.silence import silence
from tests.support.runtime.tiny import save_tokenizer

COMMAND = "\x1b]0;owned\x07"


def test_options_of_a_token_are_not_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(tmp_path, "a few words")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["added_tokens_decoder"] = {"0": {"content": "<eos>", COMMAND: True}}
    path.write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path) is not None
    said = capfd.readouterr()
    assert "owned" not in said.out + said.err


def test_streams_are_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    with silence():
        os.write(1, b"unseen")
    os.write(1, b"seen")
    said = capfd.readouterr()
    assert said.out == "seen"
