from __future__ import annotations

from pathlib import Path

import pytest

from onboard.errors import OnboardError
from onboard.runtime.tokenizer import Detokenizer, Tokenizer
from tests.unit.runtime.tiny import save_tokenizer

TEXT = "the cat sat on the mat, the dog \N{GRINNING FACE} sat \N{LATIN SMALL LETTER E WITH ACUTE}t\N{HIRAGANA LETTER A}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path, TEXT)
    return path


def test_a_checkpoint_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


def test_a_broken_tokenizer_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(OnboardError, match=f"tokenizer in {tmp_path} does not load"):
        Tokenizer.load(tmp_path)


def test_text_grows_as_tokens_do_and_never_shows_half_a_character(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT + " zebra \N{SNOWMAN}\N{ROCKET}")
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.update(tokens[:count]) for count in range(1, len(tokens) + 1)]
    assert texts[-1] == tokenizer.decode(tokens)
    for before, after in zip(texts, texts[1:], strict=False):
        assert after.startswith(before)
        assert "\N{REPLACEMENT CHARACTER}" not in after
    assert len(set(texts)) < len(texts)  # some token was but a part of a character


def test_special_tokens_are_left_out_of_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    tokens = [*tokenizer.encode("the cat"), tokenizer.hf.eos_token_id]
    assert tokenizer.decode(tokens) == "the cat"
