"""The commands as users type them, on an app of their own."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import typer

from onboard.cli import main
from onboard.cli.commands.run import run
from onboard.cli.commands.verify import print_row, verify
from onboard.cli.documents import RunDocument, VerifyDocument
from onboard.errors import UsageError
from onboard.verify.transforms import stage_limits as verification
from onboard.verify.transforms.stages import Check, VerifyReport
from tests.support.runtime.tiny import Tiny

Capture = pytest.CaptureFixture[str]


def _invoke(command: Any, *words: object) -> Any:
    app = typer.Typer()
    app.command()(command)
    return app([str(word) for word in words], standalone_mode=False)


def test_run_prints_one_document_and_nothing_else_on_stdout(llama: Tiny, capsys: Capture) -> None:
    options = [
        "--root",
        llama.root,
        "--device",
        "cpu",
        "--max-tokens",
        5,
        "--token-ids",
        "1,2,3",
        "--json",
    ]
    assert main.run(["run", str(llama.checkpoint), *map(str, options)]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    RunDocument.model_validate(document)
    assert [output["outputs"][0]["token_ids"] for output in document["outputs"]] == [
        llama.greedy([1, 2, 3], 5)
    ]
    assert document["stats"]["generated_tokens"] == 5
    assert "5 tokens in" in printed.err


def test_run_without_a_tokenizer_prints_token_ids(llama: Tiny, capsys: Capture) -> None:
    options = [
        "--root",
        llama.root,
        "--device",
        "cpu",
        "--max-tokens",
        3,
        "--token-ids",
        "1,2",
        "--token-ids",
        "4",
    ]
    _invoke(run, llama.checkpoint, *options)
    first, second = (",".join(map(str, llama.greedy(ids, 3))) for ids in ([1, 2], [4]))
    assert capsys.readouterr().out == f"> 1,2\n{first}\n\n> 4\n{second}\n\n"


def test_run_refuses_bad_input_in_one_line(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(UsageError, match="there is no prompt"):
        _invoke(run, llama.checkpoint, "--root", llama.root)
    with pytest.raises(UsageError, match="'1,x' is not a list of numbers"):
        _invoke(run, llama.checkpoint, "--token-ids", "1,x")
    with pytest.raises(UsageError, match=r"--top-p 2.0: Input should be less than or equal to 1"):
        _invoke(run, llama.checkpoint, "--token-ids", "1", "--top-p", 2.0)


def test_what_cannot_be_batch_invariant_is_refused(llama: Tiny) -> None:
    options = ["--root", llama.root, "--device", "cpu", "--token-ids", "1,2,3", "--batch-invariant"]
    with pytest.raises(
        UsageError, match="batch_invariant needs Triton's kernels; this is cpu with torch"
    ):
        _invoke(run, llama.checkpoint, *options)
    with pytest.raises(UsageError, match="nothing does it in mode transformers"):
        _invoke(run, llama.checkpoint, *options, "--mode", "transformers")


def test_verify_prints_a_row_for_each_transform_and_exits_by_the_verdict(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    options = [llama.checkpoint, "--root", llama.root, "--device", "cpu", "--seed", 3]
    assert _invoke(verify, *options) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(
        "seed 3\nnote: models/modeling_llama.py has passed no tests here\npassed\n"
    )
    assert "checked" not in printed.err
    rows = [line for line in printed.out.splitlines() if line.endswith("  ok")]
    assert len(rows) > 5
    cached = next(row for row in rows if row.startswith("insert_cached_attention ")).split()[1:-1]
    assert len(cached) == 4
    assert all(float(cell) < 1e-5 for cell in cached)
    assert not any(row.startswith("insert_cached_ssm_attention ") for row in rows), (
        "it matched nothing"
    )
    assert " more transforms matched nothing in this model" in printed.out
    monkeypatch.setattr(verification, "SAME", 1e-12)
    assert main.run(["verify", *map(str, options), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    VerifyDocument.model_validate(report)
    assert report["error"]["message"] == "the logits leave their tolerance after build_model"
    assert not report["passed"]
    assert report["first_failure"] == "build_model"


def test_every_number_of_verify_is_whole_within_80_columns(capsys: Capture) -> None:
    errors = dict.fromkeys(("prefill", "chunked prefill", "decode", "batched decode"), 3.8e-7)
    worst = "insert_cached_dynamic_mask_attention"
    for check in (
        Check("idle", errors, matched=False),
        Check("idle_but_wrong", errors | {"decode": float("nan")}, matched=False),
        Check(worst, errors | {"batched decode": 3.8e-1}),
    ):
        print_row(VerifyReport("m", "cpu", "float32", 1, [3], check.limit, [check]))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines if not line.startswith(("rmse", "after"))] == [
        ["idle_but_wrong", "3.8e-07", "3.8e-07", "nan", "3.8e-07", "wrong"],
        [worst, "3.8e-07", "3.8e-07", "3.8e-07", "3.8e-01", "wrong"],
    ]
