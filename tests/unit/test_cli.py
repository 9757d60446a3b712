from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from onboard import __version__
from onboard.cli import main
from onboard.cli.commands.model import ModelRun, resume_command
from onboard.cli.terminal import escaped
from onboard.content import CONTENT_ROOT
from onboard.errors import ConsentRequiredError, EagerDiffersError, NotCausalError, OnboardError
from onboard.workflow.lock import exclusive
from onboard.workflow.outcome import PhaseOutcome, RunOutcome
from onboard.workflow.phase import RunContext
from onboard.workflow.phase_runner import PhaseRunner
from onboard.workflow.phases import PHASES


def onboard(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onboard", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


def test_help_is_quick_and_complete() -> None:
    began = time.monotonic()
    process = onboard("--help", COLUMNS="100")
    # 0.1 s on an idle core; the bound leaves room for a busy one
    assert time.monotonic() - began < 2
    assert process.returncode == 0
    for option in (
        *(
            "--root",
            "--revision",
            "--device",
            "--dtype",
            "--until",
            "--from",
            "--fresh",
            "--dry-run",
            "--json",
        ),
        *("--trust-remote-code", "--yes", "--offline", "--debug", "--version"),
    ):
        assert f" {option} " in process.stdout
    assert f"Phases: {', '.join(PHASES)}." in " ".join(process.stdout.split())
    assert onboard().stdout == onboard("--help").stdout


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from onboard.cli import main; main.run(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    for module in ("torch", "transformers", "huggingface_hub", "pydantic"):
        assert f"'{module}'" not in process.stderr


def test_every_listed_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["-h"]) == 0
    listing = capsys.readouterr().out.split("Commands:\n")[1].split("\n\n")[0]
    for name in (line.split()[0] for line in listing.splitlines()):
        shown = set()
        for words in ([name, "--help"], [name, "-h"], ["help", name]):
            assert main.run(words) == 0
            shown.add(capsys.readouterr().out)
        assert len(shown) == 1
        text = shown.pop()
        assert text.startswith(f"Usage: onboard {name}")
        assert "range>" not in text, "a number is N"
        assert "]...]" not in text, "the parser adds brackets and dots itself"
    listings = [listing]
    for group in ("registry", "pr"):
        assert main.run([group, "-h"]) == 0
        listings.append(capsys.readouterr().out.split("Commands:\n")[1])
    for text in listings:
        assert "..." not in text, "the first sentence of a command's help is cut at 80 columns"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--version", "-V"):
        assert main.run([word]) == 0
        assert capsys.readouterr().out.strip() == __version__


def test_completion() -> None:
    def complete(words: str) -> list[str]:
        count = str(len(words.split()) - 1)
        return onboard(
            _ONBOARD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=count
        ).stdout.split()

    assert complete("onboard ver") == ["verify"]
    assert complete("onboard --tr") == ["--trust-remote-code"]
    assert complete("onboard run --temp") == ["--temperature"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["statu"],
            "there is no command 'statu'. Did you mean 'status'? A model of that name: onboard model statu",
        ),
        (["verfy", "./x"], "there is no command 'verfy'. Did you mean 'verify'?"),
        (["help", "nonesuch"], "there is no command 'nonesuch'. Commands: bench, "),
    ],
)
def test_a_word_that_is_nearly_a_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(words) == 2
    assert capsys.readouterr().err.startswith(f"onboard: {message}")


def test_ids_and_folders_near_a_command_are_models(engine: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "statu").mkdir()
    for model in ("org/statu", str(tmp_path / "statu"), "gpt2"):
        assert main.run([model, "--root", str(tmp_path)]) == 0
        assert engine["context"].model == model


WRONG = {
    "run demo x --temperature -1": "--temperature -1",
    "run demo x --token-ids a": "--token-ids 'a'",
    "run demo x --config nope.yaml": "nope.yaml",
    "run demo x --stop-token-ids a": "--stop-token-ids 'a'",
    "run demo x --set kv_cache_config.dtyp=float16": "Did you mean 'kv_cache_config.dtype'?",
    "run demo x --set kv_cache_config.dtype=int3": "kv_cache_config.dtype is 'int3'",
    "run demo x --set max_seq_len": "--set 'max_seq_len' has no value",
    "run demo x --max-batch-size 0": "max_batch_size is 0",
    "verify demo --set max_sequence_len=1": "Did you mean 'max_seq_len'?",
    "bench demo --set attn_backend=flash": "attn_backend is 'flash'",
    "run ./nope x": "there is no folder './nope'",
    "verify ./nope": "there is no folder './nope'",
    "verify demo --compile-backend nope": "'nope' is not one of",
    "kld ./nope demo": "there is no folder './nope'",
    "kld . transformers:./nope": "there is no folder './nope'",
    "kld demo demo --set-b max_sequence_len=1": "Did you mean 'max_seq_len'?",
    "kld demo transformers:demo --set-b max_seq_len=1": "transformers has no setting max_seq_len",
    "plan demo --gpu nope": "'nope'",
    "bench demo --batch nope": "--batch 'nope'",
    "bench demo --compare nope": "--compare 'nope'",
    "bench demo --config nope.yaml": "nope.yaml",
    ". --until nope": "there is no phase 'nope'",
}


@pytest.mark.parametrize(
    "words",
    ["model", "run model", "serve model", "plan model", "explain model", "status", "doctor"]
    + ["registry list", "sweep", "demo", "check", "pr status model"],
)
def test_a_root_that_is_a_file_is_refused(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main.run([*words.split(), "--root", str(tmp_path / "file")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"'--root': \w+ '.+' is a file", line), line


def test_what_is_typed_wrong_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from onboard.cli import main
for words in {list(WRONG)}:
    code = main.run([*words.split(), "--root", "."])
    heavy = sorted({{"torch", "transformers"}} & set(sys.modules))
    print(code, heavy, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = done.stderr.splitlines()
    for (words, message), error, code in zip(WRONG.items(), lines[::2], lines[1::2], strict=True):
        assert message in error, words
        assert code == "2 []", words


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen/Qwen3-8b", "Did you mean 'Qwen/Qwen3-8B'?"),
        (
            "mixtral",
            "Did you mean 'mistralai/Mixtral-8x22B-v0.1' or 'mistralai/Mixtral-8x7B-v0.1'?",
        ),
        ("qwen", r"There are \d\d, \d\d with that in their names: see onboard registry list"),
        ("nope", r"There are \d\d: see onboard registry list"),
    ],
)
def test_no_entry_is_answered_with_near_ones_or_where_all_are(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("show", "run"):
        assert main.run(["registry", command, name, "--root", str(CONTENT_ROOT)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(
            f"onboard: {name} is not in the registry. {hint}".replace("?", r"\?"), line
        )


def test_a_name_that_is_no_model_is_answered_with_registered_ones(tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    entry = {"name": "demo", "config_id": "demo", "yaml_extra": []}
    (tmp_path / "registry" / "models.yaml").write_text(json.dumps({"models": [entry]}))
    said = [
        onboard("run", *words, "--root", str(tmp_path), **environment).stderr.strip()
        for words, environment in (
            (["demos", "hi"], {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}),
            (["other", "hi", "--offline"], {"HF_HUB_OFFLINE": "", "HF_HOME": str(tmp_path)}),
        )
    ]
    assert "Did you mean 'demo' of the registry? HF_HUB_OFFLINE is set" in said[0]
    assert said[1].endswith("Registered: demo. Run once without --offline")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonesuch"], "No such option: --nonesuch"),
        (["a", "b"], "unexpected extra argument"),
        (["a", "--device", "tpu"], "'tpu'"),
        (["status", "--nonesuch"], "See onboard status --help"),
        ([".", "--until", "generat"], "there is no phase 'generat'"),
        (["run", "a", "hi", "--stop", ""], "--stop ['']: an empty stop text would"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert error.startswith("onboard: ")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the engine: returns what it was called with; `result` may be set to an outcome's
    exception.
    """
    called: dict[str, Any] = {"error": None}

    def run(_: PhaseRunner, context: RunContext, **arguments: Any) -> RunOutcome:
        called.update(arguments, context=context)
        error = called["error"]
        phase = PhaseOutcome(
            "gather",
            "failed" if error else "done",
            1.5,
            "fine",
            str(error or ""),
            {"a": "x/a.json"},
            error,
        )
        return RunOutcome(context.model, context.root, [phase])

    monkeypatch.setattr(PhaseRunner, "run", run)
    return called


def test_options_reach_the_engine(
    engine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--revision v1 --device cpu --dtype bfloat16 --until generate --from survey "
        "--fresh --trust-remote-code --yes"
    )
    assert main.run(["--root", str(tmp_path), *words.split(), "org/name"]) == 0
    context = engine["context"]
    assert (context.model, context.root, context.work_dir) == (
        "org/name",
        tmp_path,
        tmp_path / ".onboard" / "org--name",
    )
    assert (engine["until"], engine["from_"], engine["fresh"]) == ("generate", "survey", True)
    expected = {
        "revision": "v1",
        "device": "cpu",
        "dtype": "bfloat16",
        "trust_remote_code": True,
        "yes": True,
    }
    assert context.options.model_dump(exclude_defaults=True) == expected
    assert capsys.readouterr().out.strip() == f"a  {tmp_path}/x/a.json"


def test_defaults(engine: dict[str, Any]) -> None:
    assert main.run(["org/name"]) == 0
    assert engine["context"].options.model_dump(exclude_defaults=True) == {}
    assert engine["context"].root == Path.cwd()
    assert (engine["until"], engine["from_"], engine["fresh"]) == (None, None, False)


@pytest.mark.parametrize("name", ["status", "doctor"])
def test_a_model_with_the_name_of_a_command(engine: dict[str, Any], name: str) -> None:
    assert main.run(["model", name]) == 0
    assert engine["context"].model == name
    assert main.run(["--fresh", name]) == 0
    assert engine["context"].model == name


def test_json_is_all_of_stdout(
    engine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["org/name", "--root", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "command": "model",
        "model": "org/name",
        "status": "done",
        "phases": [
            {
                "name": "gather",
                "status": "done",
                "seconds": 1.5,
                "artifacts": {"a": f"{tmp_path}/x/a.json"},
                "error": None,
            }
        ],
        "artifacts": {"a": f"{tmp_path}/x/a.json"},
        "error": None,
    }
    assert engine


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConsentRequiredError("too large", hint="Use --yes"), 3, "onboard: too large. Use --yes"),
        (KeyboardInterrupt(), 130, "onboard: interrupted"),
        (
            ValueError("a\nb"),
            1,
            "onboard: internal error: ValueError: a b. Run with --debug for the traceback",
        ),
    ],
)
def test_failures(
    engine: dict[str, Any],
    error: BaseException,
    code: int,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine["error"] = error
    assert main.run(["org/name", "--json", "--fresh"]) == code
    captured = capsys.readouterr()
    assert captured.err.strip().splitlines()[-1] == line
    assert "Traceback" not in captured.err
    problem = json.loads(captured.out)["error"]
    said = line.removeprefix("onboard: ").removesuffix(". Run with --debug for the traceback")
    assert ". ".join(filter(None, (problem["message"], problem["hint"]))) == said
    assert problem["exit_code"] == code
    arguments = ["org/name", "--root", str(tmp_path)]
    assert main.run(arguments) == code
    assert "resume" not in capsys.readouterr().err  # there is nothing to resume
    (tmp_path / ".onboard" / "org--name").mkdir(parents=True)
    assert main.run(arguments, debug=True) == code
    captured = capsys.readouterr()
    assert ("Traceback" in captured.err) == (code != 130)
    assert "resume with: " in captured.err
    assert captured.out == ""


def test_json_of_what_fails_before_the_first_phase(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["/no/such", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["message"] == "there is no folder '/no/such'"
    assert document["status"] == "failed"
    assert (document["model"], document["phases"], document["artifacts"]) == ("/no/such", [], {})


def test_ctrl_c(tmp_path: Path) -> None:
    """A real signal, while the command waits for another run of the model."""
    model, root = tmp_path / "model", tmp_path / "root"
    model.mkdir()
    (root / ".onboard").mkdir(parents=True)
    with FileLock(root / ".onboard" / "model.lock"):
        process = subprocess.Popen(
            [sys.executable, "-m", "onboard", str(model), "--root", str(root)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting for another run of this model\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr.splitlines()[-1]) == (130, "onboard: interrupted")
    assert "Traceback" not in stderr
    assert not (root / ".onboard" / "model").exists()


def test_resume_command() -> None:
    words = ["org/a b", "--root", "w", "--from", "test", "--fresh", "--json"]
    assert resume_command(words) == "onboard 'org/a b' --root w --json"
    assert resume_command(["x", "--from=test"]) == "onboard x"


def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["status", "--root", str(tmp_path)]) == 0
    assert "No model was onboarded" in capsys.readouterr().out
    folder = tmp_path / ".onboard" / "org--name"
    folder.mkdir(parents=True)
    done = {"status": "done", "input_hash": "0", "seconds": 1.25}
    failed = {"status": "failed", "input_hash": "0", "seconds": 2, "error": "it broke"}
    state = {"model": "org/name", "phases": {"gather": done, "survey": failed}}
    (folder / "state.json").write_text(json.dumps(state))
    assert main.run(["status", "--root", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "org/name" in table
    assert "survey: it broke" in table
    assert "3.2" in table
    assert main.run(["status", "--root", str(tmp_path), "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["models"]["org--name"]["phases"]["gather"]["status"]
        == "done"
    )


def test_status_says_who_waits_for_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ".onboard" / "org--name"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"model": "org/name"}))
    run = {"role": "repairer", "back_end": "command", "about": "repair X", "input_hash": "0"}
    run |= {"waits_for": "the tests", "files": {"a": "b"}}
    rules = {"role": "runner", "back_end": "builtin", "about": "run Y", "input_hash": "1"}
    done = rules | {"status": "done", "about": "run Z"}
    rules |= {"waits_for": "no free GPU", "world_size": 1}
    (folder / "agents.json").write_text(json.dumps({"runs": [run, rules, done]}))
    command = ["status", "--root", str(tmp_path)]
    assert main.run(command) == 0
    output = capsys.readouterr().out
    assert "org--name: repairer (command) interrupted: repair X" in output
    assert "runner" not in output, "the rules are shown while they play"
    with exclusive(folder, waiting=lambda: None):
        assert main.run(command) == 0
        output = capsys.readouterr().out
        assert "repairer (command) waits for the tests: repair X" in output
        assert "runner (builtin) waits for no free GPU: run Y" in output
        assert "run Z" not in output
        assert main.run([*command, "--json"]) == 0
    found, playing, _ = json.loads(capsys.readouterr().out)["agents"]["org--name"]
    assert playing["world_size"] == 1
    assert (found["status"], found["waits_for"]) == ("running", "the tests")
    assert "files" not in found


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onboard.cli.commands.doctor._PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert main.run(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "secret" not in output
    assert "missing: pip install no-such-package" in output
    assert sys.version.split()[0] in output


@pytest.mark.parametrize(
    ("phase", "model_type", "error", "offered"),
    [
        ("generate", "mpt", OnboardError("no way", hint="Wait"), True),
        ("analyze", "mpt", OnboardError("no way"), True),
        ("analyze", "no-such-type", OnboardError("no way"), False),
        ("gather", "mpt", OnboardError("no weights"), False),
        ("analyze", "mpt", ConsentRequiredError("remote code"), False),
        ("analyze", "mpt", NotCausalError("it looks ahead"), False),
        ("generate", "falcon", EagerDiffersError("other logits"), False),
    ],
)
def test_a_model_that_is_not_translated_may_run_as_it_is(
    phase: str, model_type: str, error: OnboardError, offered: bool, tmp_path: Path
) -> None:
    outcome = RunOutcome("org/model", tmp_path, [PhaseOutcome(phase, "failed", exception=error)])
    context: Any = SimpleNamespace(
        source=SimpleNamespace(config=lambda: {"model_type": model_type})
    )
    options: Any = None
    found = ModelRun("org/model", tmp_path, options, context, outcome).with_way_out(error)
    assert isinstance(found, OnboardError)
    assert found.exit_code == error.exit_code
    assert ("onboard run org/model --mode hf" in str(found)) == offered
    assert ("Or run" in str(found)) == (offered and bool(error.hint))
    assert str(found).startswith(str(error).rstrip("."))


def test_a_dry_run_shows_the_users_files_first_and_no_diff_of_records(
    engine: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = PhaseRunner.run

    def run(self: PhaseRunner, context: RunContext, **arguments: Any) -> RunOutcome:
        context.files.write(context.artifact("tests.json"), "one\ntwo\n")
        (context.root / "model.py").write_text("old\nkept\n")
        context.files.write(context.root / "model.py", "new\nkept\nmore\n")
        return inner(self, context, **arguments)

    monkeypatch.setattr(PhaseRunner, "run", run)
    arguments = ["org/name", "--root", str(tmp_path), "--dry-run"]
    assert main.run(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["+2", "-1", str(tmp_path / "model.py")],
        ["+2", str(tmp_path / ".onboard" / "org--name" / "tests.json")],
    ]
    assert "+more" in lines
    assert "+two" not in lines
    assert main.run([*arguments, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [file["internal"] for file in files] == [False, True]


def test_a_terminal_gets_no_commands_of_a_model() -> None:
    assert (
        escaped("a\x1b[31mb\n\tc\x07\x9b\u202e é 日 🙂")
        == "a\\x1b[31mb\n\tc\\x07\\x9b\\u202e é 日 🙂"
    )
