"""Models that bring their own code: onboarded with consent, refused without it, stopped when the
code is hostile.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from onboard.cli.main import run
from onboard.workflow.remote import code_session
from onboard.workflow.remote.sandbox import Limits, missing
from onboard.workflow.run_model.run_model import main as run_agent
from tests.support.checkpoints import edit_config, save_checkpoint, tree
from tests.support.drawing import some_of
from tests.support.escapes import ATTEMPTS
from tests.support.hostile import places_of, put_attempts
from tests.support.remote_models import CODE, quantise_in_blocks, save_remote
from tests.support.walls import consent, standing, take_away

STYLES = ["fused2023", "biased2023", "slopes2023", "trunk2023", "moe2024", "modern"]


def test_every_style_is_tried_and_has_its_patterns_described() -> None:
    described = (CODE / "README.md").read_text(encoding="utf-8")
    assert {path.parent.name for path in CODE.glob("*/config.json")} == set(STYLES)
    assert all(f"`{style}`" in described for style in STYLES)


@pytest.mark.slow
@pytest.mark.parametrize("style", some_of(STYLES, always=(), by_chance=1))
def test_a_model_is_onboarded_with_consent_and_refused_without(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, root = save_remote(style, tmp_path / style), tmp_path / "root"
    before = tree(checkpoint)
    command = [str(checkpoint), "--root", str(root), "--device", "cpu", "--until", "run"]
    assert run(command) == 3
    shown = capsys.readouterr().err
    assert "--trust-remote-code" in shown
    assert "modeling_" in shown
    assert not root.exists()

    assert run([*command, *consent()]) == 0
    tests = json.loads((root / ".onboard" / style / "tests.json").read_text())["tests"]
    assert {test["status"] for test in tests} == {"passed"}
    assert any("cached_decode" in test["name"] for test in tests)
    (model_file,) = (root / "models").glob("modeling_*.py")
    assert "repository_code" not in model_file.read_text()
    assert tree(checkpoint) == before
    runs = json.loads((root / ".onboard" / style / "run.json").read_text())["runs"]
    for run_of in runs.values():
        assert run_of["comparison"]["beside"] == "the repository's own code", run_of["facts"]
        assert {"prefill", "cached decode"} <= {
            check["what"] for check in run_of["comparison"]["checks"]
        }


@pytest.mark.slow
def test_quantised_weights_are_compared_with_the_repository_s_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose class reads no codes: it is given what they decode to."""
    style = "moe2024"
    checkpoint, root = save_remote(style, tmp_path / style), tmp_path / "root"
    quantise_in_blocks(checkpoint)
    command = [str(checkpoint), "--root", str(root), "--device", "cpu", "--until", "run"]
    assert run([*command, *consent()]) == 0, capsys.readouterr().err
    runs = json.loads((root / ".onboard" / style / "run.json").read_text())["runs"]
    for run_of in runs.values():
        assert any("in fp8" in fact for fact in run_of["facts"])
        assert run_of["comparison"]["beside"] == "the repository's own code", run_of["facts"]
    where = [str(checkpoint), "--root", str(root), "--device", "cpu"]
    capsys.readouterr()
    assert run(["verify", *where]) == 3
    assert "--trust-remote-code" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_verify_compares_with_the_repository_s_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    style = random.choice(STYLES)
    print(style)
    checkpoint, root = save_remote(style, tmp_path / style), tmp_path / "root"
    where = [str(checkpoint), "--root", str(root), "--device", "cpu", *consent()]
    assert run([*where, "--until", "register"]) == 0
    assert run(["verify", *where]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out.splitlines()
    assert "compared with the repository's own code" in said
    assert said[-1] == "passed"


@pytest.mark.slow
def test_no_other_class_stands_for_code_of_a_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor one of transformers that has its name: a model file's config is none of transformers'."""
    checkpoint, root = save_remote("modern", tmp_path / "modern"), tmp_path / "root"
    where = [str(checkpoint), "--root", str(root), "--device", "cpu"]
    assert run([*where, *consent(), "--until", "generate"]) == 0
    edit_config(checkpoint, architectures=["LlamaForCausalLM"])
    capsys.readouterr()
    for mode in ("hf", "transformers"):
        assert run(["run", *where, "--mode", mode, "--token-ids", "1,2"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "no class of transformers stands for" in said
    sizes = ["--batch", "1", "--context", "16"]
    assert run(["bench", *where, *sizes, "--compare", "hf"]) == 2
    said = capsys.readouterr().err
    assert "no class of transformers stands for" in said
    assert "measuring" not in said, "it is refused before anything takes time"


@pytest.mark.parametrize("style", some_of(["biased2023", "modern"], always=(), by_chance=1))
def test_another_head_than_the_embedding_that_the_code_ties_it_to_is_refused(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, root = (
        save_remote(style, tmp_path / style, tie_word_embeddings=True),
        tmp_path / "r",
    )
    command = [str(checkpoint), "--root", str(root), "--device", "cpu", *consent()]
    [path] = checkpoint.glob("*.safetensors")
    tensors = load_file(path)
    [embedding] = [name for name in tensors if name.endswith(("wte.weight", "embed_tokens.weight"))]
    for factor, code in ((2, 1), (1, 0)):
        save_file(
            {**tensors, "lm_head.weight": factor * tensors[embedding]}, path, {"format": "pt"}
        )
        assert run([*command, "--until", "gather"]) == code
        said = f"onboard: lm_head.weight differs from {embedding}, and config.json says"
        assert (said in capsys.readouterr().err) == bool(code)


@pytest.mark.exhaustive
def test_a_model_file_that_is_wrong_is_found_by_the_repository_s_code(tmp_path: Path) -> None:
    checkpoint, root = save_remote("modern", tmp_path / "modern"), tmp_path / "root"
    command = [str(checkpoint), "--root", str(root), "--device", "cpu", *consent()]
    assert run([*command, "--until", "register"]) == 0
    (model_file,) = (root / "models").glob("modeling_*.py")
    text = model_file.read_text()
    changed = re.sub(r"(torch_rmsnorm\(.*?self\.weight)", r"\1 * 1.01", text, count=1)
    assert changed != text
    model_file.write_text(changed)
    options = ["--entry", "modern", "--root", str(root), "--device", "cpu", *consent()]
    for words, status in ((options, "bad_generation"), (options[:6], "success")):
        assert run_agent([*words, "--output", str(tmp_path / "run.json")]) == (words is options)
        result = json.loads((tmp_path / "run.json").read_text())
        assert result["status"] == status, result["error"]
        assert (words is options) == ("the repository's own code" in str(result["error"]))


def _commands(text: str) -> dict[str, str]:
    """Return the commands of a pull request's text by what they run."""
    found = re.findall(r"^```bash\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    return {
        name: command
        for command in found
        for name in ("pytest", "run_model", "--until test")
        if name in command
    }


@pytest.mark.exhaustive
def test_the_commands_of_a_pull_request_repeat_on_another_machine(tmp_path: Path) -> None:
    style = random.choice(STYLES)
    print(style)
    checkpoint, root, other = (
        save_remote(style, tmp_path / style),
        tmp_path / "root",
        tmp_path / "other",
    )
    root.mkdir()
    (root / ".gitignore").write_text(".onboard/\n__pycache__/\nrun.json\n*.lock\n")
    author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    subprocess.run(["git", *author, "commit", "-q", "-m", "start"], cwd=root, check=True)
    assert run([str(checkpoint), "--root", str(root), "--device", "cpu", *consent()]) == 0
    [text] = root.glob(".onboard/*/pull_request.md")
    commands = _commands(text.read_text())
    files = [path.name for path in checkpoint.glob("*.py")]
    assert files
    assert all(f"- `{name}` (sha256 `" in text.read_text() for name in files)

    subprocess.run(
        ["git", "clone", "-q", "-b", f"onboard/{style}", str(root), str(other)], check=True
    )
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, words in (("python", ""), ("onboard", "-m onboard ")):
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (bin_folder / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    for name, code in (("pytest", 2), ("--until test", 0), ("pytest", 0), ("run_model", 0)):
        command = commands[name].replace(f"path/to/{style}", str(checkpoint))
        done = subprocess.run(
            ["sh", "-c", command], cwd=other, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert code == 0 or "onboard MODEL --trust-remote-code --until test" in done.stdout
    assert (
        subprocess.run(
            ["git", "status", "--porcelain"], cwd=other, capture_output=True, text=True
        ).stdout
        == ""
    )


HOSTILE = {
    "reply": (
        "import os\nfor pipe in range(3, 64):\n    try:\n        os.write(pipe, b'\\xff' * 99)\n"
        "    except OSError:\n        pass\nos._exit(0)",
        "sent a reply of 4294967295 bytes",
    ),
    "loop": ("while True:\n    pass", "stopped after 8 s"),
    "memory": ("hog = [bytearray(2**26) for _ in range(10**6)]", "MemoryError"),
    "exit": ("import os\nos._exit(0)", "without a result"),
}
"""What the code does when it is imported, and what is said of it."""


def _hostile(folder: Path) -> Path:
    """A checkpoint whose config class is to be had from `c.py`."""
    checkpoint = save_checkpoint(folder)
    auto_map = {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}
    edit_config(checkpoint, model_type="hostile", auto_map=auto_map)
    return checkpoint


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_code_is_stopped_and_leaves_files_as_they_were(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, root = _hostile(tmp_path / "checkpoint"), tmp_path / "root"
    code, message = HOSTILE[kind]
    (checkpoint / "c.py").write_text(f"{code}\n")
    seconds = 8.0 if kind == "loop" else 300.0
    monkeypatch.setattr(code_session, "LIMITS", Limits(seconds=seconds, gibibytes=2.0))
    before = tree(tmp_path)
    assert run([str(checkpoint), "--root", str(root), "--device", "cpu", *consent()]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    print(last)
    assert "the model's code" in last
    assert message in last
    assert "Traceback" not in last
    assert tree(tmp_path) == before
    assert load_file(next(checkpoint.glob("*.safetensors")))


@pytest.mark.skipif(sys.platform != "linux", reason="these walls are Linux's")
def test_a_repository_that_tries_everything_gets_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, root = _hostile(tmp_path / "checkpoint"), tmp_path / "root"
    walls = standing()
    limits = Limits(seconds=300.0, gibibytes=2.0, file_gibibytes=0.1)
    monkeypatch.setattr(code_session, "LIMITS", limits)
    with places_of(tmp_path) as places:
        monkeypatch.setenv("HF_TOKEN", places["token"])
        (checkpoint / "c.py").write_text(put_attempts(checkpoint, places, walls))
        before = tree(checkpoint), Path(places["secret"]).stat().st_mtime_ns
        command = [str(checkpoint), "--root", str(root), "--device", "cpu"]
        asked = ["--trust-remote-code", *(["--unsandboxed"] if missing(walls) else [])]
        assert run([*command, *asked]) == 1
        last = capsys.readouterr().err.strip().splitlines()[-1]
        print(last)
        assert re.search(r"of \d+ attempts there got none", last)
        assert missing(walls) or f"of {len(ATTEMPTS)} attempts" in last
        assert (tree(checkpoint), Path(places["secret"]).stat().st_mtime_ns) == before
        assert sorted(os.listdir(places["outside"])) == ["fifo", "key"]
        assert not root.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the wall is Linux's")
def test_where_a_wall_is_missing_the_user_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, root = _hostile(tmp_path / "checkpoint"), tmp_path / "root"
    (checkpoint / "c.py").write_text("raise RuntimeError('it ran')\n")
    command = [str(checkpoint), "--root", str(root), "--device", "cpu", "--trust-remote-code"]
    take_away("writing,calls", tmp_path, monkeypatch)
    assert run(command) == 3
    shown = capsys.readouterr().err
    assert "it ran" not in shown
    assert all(word in shown for word in ("writing: ", "calls: ", "--unsandboxed"))
    assert not root.exists()
    assert run([*command, "--unsandboxed"]) == 1
    assert "it ran" in capsys.readouterr().err


_TAMPERING = """
import contextlib as _c, os as _os
import onboard.workflow.remote.tasks as _t
for _n in range(99):
    for _name in (f"{_n}.request", f"{_n}.reply", f"{_n}.part", "output.txt", "results.json"):
        with _c.suppress(OSError):
            _os.symlink(VICTIM, _name)
            _os.mkfifo(f"{_name}.fifo")
_analyze, _generate = _t.TASKS["analyze"], _t.TASKS["generate"]
def _changed(task, old, new):
    def changed(*args, **kwargs):
        result = task(*args, **kwargs)
        if isinstance(result, str):
            return result.replace(old, new)
        return {**result, "text": result["text"].replace(old, new)}
    return changed
"""
_TRICKS = {
    "another_family": (
        "_t.TASKS['analyze'] = _changed(_analyze, 'family: aurora', 'family: llama')",
        "is not of this model (family)",
    ),
    "a_path": (
        "_t.TASKS['analyze'] = _changed(_analyze, 'family: aurora', 'family: ../../{name}')",
        "spec is not valid (family",
    ),
    "a_file": (
        "_t.TASKS['analyze'] = _changed(_analyze, 'modeling_aurora.py: ', '../../{name}: ')",
        "spec is not valid (repository.files",
    ),
    "code": (
        "_t.TASKS['generate'] = _changed(_generate, 'register_config(A', "
        "'_X = torch.os.popen(\"touch {victim}\")\\nregister_config(A')",
        "not known to be harmless (line ",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("trick", _TRICKS)
def test_what_code_does_to_the_process_it_is_in_stays_there(
    trick: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It lays links where files of the parent's might be, and answers in the tasks' place."""
    victim, root = tmp_path / "victim", tmp_path / "root"
    checkpoint = save_remote("modern", tmp_path / "modern")
    line, message = _TRICKS[trick]
    with (checkpoint / "modeling_aurora.py").open("a") as file:
        file.write(_TAMPERING.replace("VICTIM", repr(str(victim))))
        file.write(line.format(name="victim", victim=victim) + "\n")
    victim.write_text("mine")
    before = tree(tmp_path / "modern"), victim.stat().st_mtime_ns
    command = [str(checkpoint), "--root", str(root), "--device", "cpu", "--until", "generate"]
    assert run([*command, *consent()]) == 1
    shown = capsys.readouterr().err
    print(shown)
    assert message in shown
    assert (tree(tmp_path / "modern"), victim.stat().st_mtime_ns) == before
    assert victim.read_text() == "mine"
    assert not (root / "models").exists()
