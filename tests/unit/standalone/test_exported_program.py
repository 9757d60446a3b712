"""A program with a static cache computes what transformers does, in a process that has torch
alone.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.cli import main
from onboard.errors import NoCachedFormError, OnboardError, UsageError
from onboard.standalone.export import export_model
from onboard.standalone.exported_program import ProgramOptions
from tests.support.runtime.tiny import Tiny, make_tiny
from tests.support.standalone import program_outside
from tests.support.static.models import HARDER, MODELS

TOKENS, LENGTH = 7, 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _answers(folder: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = str(Path(program_outside.__file__))
    words = [sys.executable, "-P", script, "jobs.json", "results.json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return answers


def _compare(folder: Path, models: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Export each model, in one form or the other, and compare greedy tokens with transformers."""
    seed = random.randrange(2**31)
    print(f"prompts seed {seed}")
    draw = random.Random(seed)
    jobs, tinies = {}, {}
    for index, (name, (model_type, options)) in enumerate(models.items()):
        tiny = make_tiny(folder / str(index), model_type, own_file=False, **options)
        form = f"static_v{(seed + index) % 2 + 1}"
        wanted = ProgramOptions(form=form, length=LENGTH, device=DEVICE)
        out = folder / f"out{index}"
        done = export_model(
            str(tiny.checkpoint), "exported-program", root=tiny.root, out=out, program=wanted
        )
        renamed = out / f"program{index}"
        (out / done.package).rename(renamed)
        prompts = [[draw.randrange(3, 97) for _ in range(size)] for size in (13, 1, 29)]
        jobs[name] = {
            "folder": str(out),
            "package": renamed.name,
            "prompts": prompts,
            "count": TOKENS,
        }
        tinies[name] = tiny
    for name, answer in _answers(folder, jobs).items():
        prompts = jobs[name]["prompts"]
        expected = [tinies[name].greedy(ids, TOKENS) for ids in prompts]
        # A program ends where its caches do.
        expected[-1] = expected[-1][: LENGTH + 1 - len(prompts[-1])]
        assert answer["tokens"] == expected, name
        assert answer["pieces"] == [expected[0][0]] * 2, name
        assert answer["problem"], f"{name} takes a wrong end_idx"


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    _compare(tmp_path, {name: MODELS[name] for name in ("GPT-2", "Gemma 3")})


@pytest.mark.exhaustive
def test_tokens_of_more_models_are_too(tmp_path: Path) -> None:
    _compare(tmp_path, {**MODELS, **HARDER})


@pytest.fixture
def llama(tmp_path: Path) -> Tiny:
    return make_tiny(tmp_path, own_file=False)


def test_the_command_writes_what_it_lists(
    llama: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "export",
        str(llama.checkpoint),
        "--root",
        str(llama.root),
        "--out",
        str(tmp_path / "o"),
    ]
    more = ["--cache", "static_v1", "--max-seq-len", "24", "--dtype", "float16", "--json"]
    assert main.run([*words, "--to", "exported-program", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    listed = {path.relative_to(tmp_path / "o").as_posix() for path in (tmp_path / "o").rglob("*.*")}
    assert set(found["files"]) == listed
    described = json.loads((tmp_path / "o" / found["package"] / "program.json").read_text())
    assert (described["form"], described["cache_length"]) == ("static_v1", 24)
    assert described["caches"] == [{"kv_heads": 2, "head_dim": 8, "dtype": "float16"}] * 4
    names = [f"{kind}_cache_{layer}" for layer in range(2) for kind in ("key", "value")]
    assert described["inputs"] == ["input_ids", "position_ids", *names, "start_idx", "end_idx"]


def test_what_a_program_cannot_be_is_said(llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="caches of 8 places are too short"):
        _export(llama, ProgramOptions(length=8))
    with pytest.raises(UsageError, match="max_seq_len is 500 and the model has 128 positions"):
        _export(llama, ProgramOptions(length=500))
    with pytest.raises(UsageError, match="there is no static cache 'static_v3'"):
        _export(llama, ProgramOptions(form="static_v3"))
    mamba = make_tiny(tmp_path / "mamba", "mamba", own_file=False, state_size=4)
    with pytest.raises(NoCachedFormError, match="torch_causal_conv1d.default mixes tokens"):
        _export(mamba, ProgramOptions())
    assert not (llama.root / "exported").exists()


def test_other_kinds_take_no_options_of_programs(
    llama: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", str(llama.checkpoint), "--root", str(llama.root), "--to", "plain"]
    assert main.run([*words, "--cache", "static_v1"]) == UsageError.exit_code
    assert "--to plain takes no cache" in capsys.readouterr().err


def _export(tiny: Tiny, options: ProgramOptions) -> OnboardError | None:
    export_model(str(tiny.checkpoint), "exported-program", root=tiny.root, program=options)
    return None
