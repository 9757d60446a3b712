"""A clone without Git LFS has small texts where large files belong: whoever reads one says so."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from onboard.errors import OnboardError
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.runtime.tokenizer import Tokenizer
from onboard.sources import gguf_header
from tests.support.runtime.tiny import save_tokenizer

READERS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": lambda path: Checkpoint(path.parent)._tensors,
    "tokenizer.json": lambda path: Tokenizer.load(path.parent),
    "tokenizer.model": lambda path: Tokenizer.load(path.parent),
    "model-Q4_0.gguf": gguf_header.read_header,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_is_named_with_what_fetches_the_file(name: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "a cat")
    if name == "tokenizer.model":
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    size = random.randrange(10**6, 10**10)
    digest = hashlib.sha256(str(size).encode()).hexdigest()
    (tmp_path / name).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {size}\n"
    )
    with pytest.raises(OnboardError, match=f"{name} is a pointer of Git LFS") as caught:
        READERS[name](tmp_path / name)
    assert caught.value.hint == f"Run git lfs pull in {tmp_path}"
