"""Tuning: what there is to try, what is kept, and what becomes of a configuration file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from onboard.bench.tuning import tune as tuning_module
from onboard.bench.tuning.knobs import Choice, choices, plain
from onboard.bench.tuning.tune import Trial, Tuning, choose_buckets, geometric_mean_ratio
from onboard.bench.tuning.tuned_config import MARK, write
from onboard.cli import main
from onboard.config import RuntimeConfig
from onboard.errors import OnboardError, UsageError
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.context import HistoryEntry
from onboard.registry import load_standalone
from onboard.runtime.engine import Engine
from tests.support.apart import run_apart
from tests.support.runtime.tiny import Tiny

TRIAL = Trial("as configured", "", {"decode": 2.5}, 0.0, 1.0, kept=True)


def history(*keys: str) -> list[HistoryEntry]:
    return [HistoryEntry(key, "", True, False, 3, 0.1, True, True, 0) for key in keys]


def test_only_what_the_model_has_and_this_machine_offers_is_tried() -> None:
    found = choices(RuntimeConfig(), history("fuse_rmsnorm", "compile_model"), gpu=False)
    knobs = {(choice.knob, choice.value) for choice in found}
    assert ("fuse_rmsnorm.rmsnorm_backend", "torch") in knobs
    assert ("attn_backend", "triton") in knobs
    assert not any(choice.knob.startswith(("fuse_silu_mul", "compile_model")) for choice in found)
    assert not {value for _, value in knobs} & {"auto", "flashinfer", "trtllm"}
    for choice in found:
        load_pipeline(choice.applied(RuntimeConfig()).transforms)


def test_the_plain_graph_has_torch_operators_alone() -> None:
    runtime = plain(RuntimeConfig(transforms={"fuse_rmsnorm": {"rmsnorm_backend": "triton"}}))
    assert (runtime.attn_backend, runtime.compile_backend) == ("torch", "torch-simple")
    for transform in load_pipeline(runtime.transforms):
        for name in ("backend", "rmsnorm_backend"):
            assert getattr(transform.config, name, None) in (None, "torch", "torch-simple")


def test_buckets_are_kept_where_padding_would_cost() -> None:
    assert choose_buckets({1: 1.0, 2: 1.01, 4: 1.015, 8: 1.5, 16: 1.52, 32: 3.0}) == [4, 16, 32]
    assert choose_buckets({8: 1.0}) == [8]
    assert geometric_mean_ratio({"a": 1.0, "b": 8.0}, {"a": 2.0, "b": 4.0}) == pytest.approx(1.0)


def test_a_configuration_keeps_its_lines_and_gets_the_figures(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        "# mine\nmodel: acme/m  # kept\nmax_batch_size: 4\ntransforms:\n  optimize_rope:\n    enabled: true\n"
    )
    changes = {
        "transforms": {"fuse_rmsnorm": {"rmsnorm_backend": "torch"}},
        "cuda_graph_config": {"batch_sizes": [1, 4]},
    }
    for date in ("2026-01-01", "2026-01-02"):
        write(path, Tuning(changes, [TRIAL], {1: 0.5, 4: 0.75}), "a GPU", date)
    text = path.read_text()
    assert text.startswith("# mine\nmodel: acme/m  # kept\nmax_batch_size: 4\n")
    assert text.count(MARK) == 3
    assert "2026-01-01" not in text
    assert "1: 0.500, 4: 0.750" in text
    runtime = load_standalone(path)
    assert runtime.transforms == {
        "optimize_rope": {"enabled": True},
        "fuse_rmsnorm": {"rmsnorm_backend": "torch"},
    }
    assert runtime.cuda_graph_config.batch_sizes == [1, 4]


def test_a_change_that_the_configuration_refuses_leaves_it_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("model: acme/m\n")
    with pytest.raises((OnboardError, UsageError)):
        write(path, Tuning({"no_such_field": 1}, [TRIAL]), "a GPU", "2026-01-01")
    assert path.read_text() == "model: acme/m\n"
    assert list(tmp_path.iterdir()) == [path]


def _spoiled(gm: fx.GraphModule) -> None:
    """Make every logit a little larger: quick, and wrong."""
    output = next(iter(gm.graph.find_nodes(op="output")))
    (logits,) = output.all_input_nodes
    with gm.graph.inserting_before(output):
        output.replace_input_with(
            logits, gm.graph.call_function(torch.ops.aten.mul.Scalar, (logits, 1.001))
        )
    gm.recompile()


def test_a_quick_choice_with_other_logits_is_not_kept(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three made-up choices: one is wrong, one is right and quick, one does not run."""
    build, times = tuning_module._Bench.build, tuning_module._Bench.times
    wanted = [
        Choice(name, 1, {"max_num_tokens": size})
        for name, size in (("wrong", 91), ("right", 92), ("broken", 93))
    ]

    def built(bench: Any, runtime: RuntimeConfig) -> Engine:
        if runtime.max_num_tokens == 93:
            raise OnboardError("no such kernel")
        engine = build(
            bench,
            runtime.model_copy(update={"transforms": {"call_ops_directly": {"enabled": False}}}),
        )
        if runtime.max_num_tokens == 91:
            _spoiled(engine.gm)  # type: ignore[arg-type]
        engine.facts.append(f"tokens {runtime.max_num_tokens}")
        return engine

    def timed(bench: Any, engine: Engine) -> tuple[dict[str, float], float]:
        found, _ = times(bench, engine)
        quick = engine.cache.info.max_num_tokens in (91, 92)
        return dict.fromkeys(found, 1.0 if quick else 2.0), 0.0

    monkeypatch.setattr(tuning_module._Bench, "build", built)
    monkeypatch.setattr(tuning_module._Bench, "times", timed)
    monkeypatch.setattr(tuning_module, "choices", lambda *_, **__: wanted)
    monkeypatch.setattr(
        tuning_module, "_graph", lambda engine: str(engine.cache.info.max_num_tokens)
    )
    path = llama.root / "tuned.yaml"
    words = [
        "tune",
        str(llama.checkpoint),
        "--root",
        str(llama.root),
        "--device",
        "cpu",
        "--config",
        str(path),
    ]
    assert (
        main.run([*words, "--batch", "1", "--context", "8", "--repeats", "2", "--seed", "3"]) == 0
    )
    shown = capsys.readouterr().out
    assert "its logits are others" in " ".join(shown.split())
    text = path.read_text()
    assert load_standalone(path).max_num_tokens == 92
    assert f"{MARK}broken 1: does not run: no such kernel" in text
    path.unlink()


def test_without_a_context_prompts_leave_room_for_the_output(
    llama: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model reads as many tokens as the usual prompt has."""
    positions = json.loads((llama.checkpoint / "config.json").read_text())[
        "max_position_embeddings"
    ]
    monkeypatch.setattr(tuning_module, "choices", lambda *_, **__: [])
    path = llama.root / "tuned.yaml"
    words = ["tune", str(llama.checkpoint), "--root", str(llama.root), "--device", "cpu"]
    assert main.run([*words, "--config", str(path), "--batch", "1", "--dry-run", "--json"]) == 0
    shapes = json.loads(capsys.readouterr().out)["trials"][0]["milliseconds"]
    [context] = {int(number) for shape in shapes for number in re.findall(r"context (\d+)", shape)}
    assert 0 < context < positions


def test_a_model_without_a_configuration_is_one_line(
    llama: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main.run(["tune", str(llama.checkpoint), "--root", str(llama.root), "--device", "cpu"]) == 2
    )
    message = capsys.readouterr().err.splitlines()[-1]
    assert "is not registered under" in message
    assert "--config" in message


def test_the_reading_kernel_is_right_in_the_interpreter() -> None:
    run_apart(Path(__file__).parent, "interpreted_read.py")
