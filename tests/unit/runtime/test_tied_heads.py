"""A head of its own that the config ties to the embedding is no model: none is run in silence with
one of the two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onboard import LLM
from onboard.cli.main import run
from onboard.config import Mode
from onboard.errors import OnboardError
from onboard.runtime.ranks.leading import kept_workers
from tests.support import quantised
from tests.support.checkpoints import edit_config, save_checkpoint
from tests.support.sharding.zoo import ROOT

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DIFFERS = f"{HEAD} differs from {EMBEDDING}, and config.json says that they are one"
Tensors = dict[str, torch.Tensor]


def change(folder: Path, edit: Callable[[Tensors], object], name: str = EMBEDDING) -> None:
    """Change the file that holds a tensor."""
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text()) if index.is_file() else {"weight_map": {}}
    path = folder / said["weight_map"].get(name, "model.safetensors")
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})
    if index.is_file():
        others = {key: file for key, file in said["weight_map"].items() if file != path.name}
        said["weight_map"] = others | dict.fromkeys(tensors, path.name)
        index.write_text(json.dumps(said))


def with_head(folder: Path, factor: float, embedding: str = EMBEDDING) -> Path:
    """Give a model whose config ties its head the embedding's multiple for one, under a name of its
    own.
    """
    edit_config(folder, tie_word_embeddings=True)
    change(folder, lambda held: held.update({HEAD: factor * held[embedding]}), embedding)
    return folder


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, ROOT, device="cpu", **settings)


@pytest.mark.drawn(few=2)
@pytest.mark.parametrize(
    ("model_type", "embedding", "shards"),
    [
        ("llama", EMBEDDING, "5GB"),
        ("llama", EMBEDDING, "20KB"),
        ("gemma2", EMBEDDING, "5GB"),
        ("gpt2", "transformer.wte.weight", "5GB"),
    ],
)
def test_another_head_is_refused_by_name(
    model_type: str, embedding: str, shards: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "tiny", model_type, shard_size=shards)
    assert (folder / "model.safetensors.index.json").is_file() == (shards == "20KB")
    expected = f"{HEAD} differs from {embedding}, and config.json says that they are one"
    with pytest.raises(OnboardError, match=expected):
        load(with_head(folder, 2, embedding))
    ids = [3, 1, 4]
    tied = load(with_head(folder, 1, embedding)).logits(ids)
    change(folder, lambda held: held.pop(HEAD), HEAD)
    assert torch.equal(tied, load(folder).logits(ids))


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_head(save_checkpoint(tmp_path / "tiny"), 2)
    assert (
        run(["run", str(folder), "--root", str(ROOT), "--token-ids", "1", "--device", "cpu"]) == 1
    )
    [*_, last] = capsys.readouterr().err.strip().splitlines()
    assert last.startswith(f"onboard: {DIFFERS}")


@pytest.mark.parametrize("mode", ["transformers", "hf"])
def test_no_mode_takes_one_for_both(mode: Mode, tmp_path: Path) -> None:
    folder = with_head(save_checkpoint(tmp_path / "tiny"), 2)
    with pytest.raises(OnboardError, match=DIFFERS):
        load(folder, mode=mode)


def test_codes_are_compared_by_their_values(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(quantised.FOLDER / "ct_embeddings", tmp_path / "tiny"))
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(OnboardError, match=DIFFERS):
        load(folder)
    parts = ("weight_packed", "weight_scale")

    def copy(held: Tensors) -> None:
        for each in parts:
            held[f"lm_head.{each}"] = held[f"model.embed_tokens.{each}"].clone()

    change(folder, copy)
    assert load(folder).logits([3, 1, 4]).isfinite().all()


def test_ranks_refuse_it_and_go_on(tmp_path: Path) -> None:
    folder = with_head(save_checkpoint(tmp_path / "tiny"), 2)
    with kept_workers(2):
        with pytest.raises(OnboardError, match=DIFFERS):
            load(folder, world_size=2)
        assert load(with_head(folder, 1), world_size=2).logits([3, 1, 4]).isfinite().all()
