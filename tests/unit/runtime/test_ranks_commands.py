"""What several ranks divide is known before they start, and verify, bench, plan and the judge of a
sweep run on them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard import LLM
from onboard.bench.shape import Shape
from onboard.bench.subject import open_subject
from onboard.bench.whole_measurement import Settings, run_suite
from onboard.cli import main
from onboard.config import RuntimeConfig
from onboard.errors import UsageError
from onboard.gpu import Memory
from onboard.graph.export import few_rows
from onboard.graph.export.layer_kinds import UnlikeError
from onboard.graph.fx import op_name
from onboard.graph.sharding.apply import IndivisibleError
from onboard.parallel import links
from onboard.parallel.ranks import Ranks
from onboard.parallel.workers import Workers
from onboard.runtime.ranks import devices_here, leading, rehearsed_division
from onboard.runtime.ranks.devices_here import fewer_ranks
from onboard.runtime.ranks.division import Division
from onboard.runtime.ranks.kept_division import find_division
from onboard.runtime.ranks.leading import LedRanks, division_for, kept_workers
from onboard.runtime.ranks.rehearsed_division import rehearsed
from onboard.verify.transforms.stages import verify_model
from onboard.workflow.run_model.run_model import run
from onboard.workflow.sweep.judge import judge
from tests.support.drawing import some_of
from tests.support.sharding.zoo import ROOT, divided, save_family

LAYERS = 5
MAPPINGS: dict[str, dict[str, int]] = {"moe_tp": {"moe_tp": 2}, "moe_ep": {"moe_ep": 2}, "": {}}
SETTINGS: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4, "max_num_tokens": 64}


@pytest.fixture(scope="module")
def seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with kept_workers(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """More layers of a kind than are looked at, and experts that are divided by their numbers."""
    folder = tmp_path_factory.mktemp("mixtral")
    return save_family(folder, "mixtral", seed, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """Two layers, for what takes many steps."""
    return save_family(tmp_path_factory.mktemp("small"), "mixtral", seed, num_hidden_layers=2)


@pytest.fixture(scope="module")
def division(mixtral: Path) -> Division:
    return find_division(mixtral, RuntimeConfig(world_size=2), gpu=False, root=ROOT)


def test_the_division_is_that_of_the_ranks(mixtral: Path, division: Division) -> None:
    gm, context = divided(mixtral, Ranks(0, 2))
    calls = Counter(map(op_name, gm.graph.nodes))
    assert division.collectives == {name: calls[name] for name in ("dist_all_reduce", "all_gather")}
    summary = next(each.summary for each in context.history if each.key == "apply_sharding_hints")
    mib = (f"{size / 2**20:.1f}" for size in (division.rank_bytes, division.whole_bytes))
    assert summary.endswith("{} of {} MiB of weights".format(*mib))
    experts = 3 * 8 * LAYERS
    assert division.weights == {"mha": 4 * LAYERS, "moe": experts, "vocabulary": 2}
    norms, routers = 2 * LAYERS + 1, LAYERS
    assert division.all_weights == 4 * LAYERS + experts + 2 + norms + routers


def test_a_division_is_found_once(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, division: Division
) -> None:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path))
    how: dict[str, Any] = {"gpu": False, "root": ROOT}
    assert find_division(mixtral, RuntimeConfig(world_size=2), **how) == division
    monkeypatch.setattr("onboard.runtime.ranks.rehearsed_division.rehearsed", None)
    assert find_division(mixtral, RuntimeConfig(world_size=2), **how) == division
    with pytest.raises(TypeError):  # of other ranks it is another one
        find_division(mixtral, RuntimeConfig(world_size=4), **how)


@pytest.mark.parametrize("mapping", some_of(MAPPINGS, always=("",), by_chance=1))
def test_of_experts_a_few_are_built_and_all_are_counted(
    mapping: str, mixtral: Path, division: Division, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all of them are: two ranks have four of eight each."""
    built: list[int] = []
    whole = rehearsed_division._divided_by
    monkeypatch.setattr(
        rehearsed_division,
        "_divided_by",
        lambda context, experts: built.append(experts) or whole(context, experts),
    )
    how: dict[str, Any] = {"gpu": False, "root": ROOT}
    runtime = RuntimeConfig.model_validate({"world_size": 2, "dist_mapping": MAPPINGS[mapping]})
    few = rehearsed(mixtral, runtime, **how) if mapping else division
    monkeypatch.setattr(rehearsed_division, "few_experts", _refuses)
    assert rehearsed(mixtral, runtime, **how) == few
    assert built == [rehearsed_division.FEW_EXPERTS, rehearsed_division._ALL][not mapping :]


@pytest.mark.drawn
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
def test_of_stacked_experts_a_few_rows_are_exported_and_all_are_counted(
    family: str, mapping: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"gpt_oss": {"layer_types": LAYERS * ["full_attention"]}}.get(family, {})
    checkpoint = save_family(tmp_path, family, seed, num_hidden_layers=LAYERS, **layers)
    runtime = RuntimeConfig.model_validate({"world_size": 2, "dist_mapping": MAPPINGS[mapping]})
    few = rehearsed(checkpoint, runtime, gpu=False, root=ROOT)
    monkeypatch.setattr(few_rows, "find_stacks", lambda *_: ())
    assert rehearsed(checkpoint, runtime, gpu=False, root=ROOT) == few


def _refuses(_: int) -> Any:
    raise UnlikeError("experts are made in different ways")


@pytest.mark.parametrize(
    ("settings", "error", "message", "hint"),
    [
        ({"world_size": 3}, IndivisibleError, "4 and 2 heads .* among 3 ranks", ": 2, 4$"),
        ({"dist_mapping": {"tp": 4}}, UsageError, "tp 4 for 2 ranks", "2"),
        ({"dist_mapping": {"pp": 3}}, UsageError, "pp 3 for 2 ranks, and a stage has one", "2"),
        ({"dist_mapping": {"moe_ep": 3}}, UsageError, "moe_tp 1 and moe_ep 3 for 2", "product"),
    ],
)
def test_what_ranks_cannot_divide_is_refused_before_they_start(
    mixtral: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    error: type[UsageError],
    message: str,
    hint: str,
) -> None:
    monkeypatch.setattr(leading, "start_workers", None)
    with pytest.raises(error, match=message) as raised:
        LLM(mixtral, ROOT, device="cpu", settings={"world_size": 2, **settings})
    assert raised.value.exit_code == 2
    assert hint.rstrip("$") in raised.value.hint


CONFIGURED: dict[str, Any] = {"world_size": 4, "max_seq_len": 64}


def test_fewer_devices_than_configured_are_said_and_taken_where_they_hold_the_model(
    workers: Workers, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four GPUs two are there."""
    monkeypatch.setattr(devices_here, "device_memory", lambda _: Memory(2**33, 2**33))
    runtime = RuntimeConfig.model_validate({**CONFIGURED, "device": "cpu"})
    found = fewer_ranks(small, runtime, 2, root=ROOT, model="small")
    assert found is not None
    assert found.world_size == 2
    with closing(LedRanks(found, "cpu")) as ranks:
        engine = ranks.build(small, runtime, root=ROOT)
        assert "runs on 2 devices; the config's world_size is 4" in engine.facts
        assert engine.cache.ranks.world_size == 2


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_fewer_devices_than_configured_that_do_not_hold_the_model_are_refused(
    small: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """Three would be there, of which two can divide it."""
    monkeypatch.setattr(devices_here, "device_memory", lambda _: Memory(2**18, 2**18))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(leading, "start_workers", None)
    runtime = RuntimeConfig.model_validate(CONFIGURED)
    with pytest.raises(
        UsageError, match=r"^small is configured for 4 GPUs; .* 0\.25 MiB"
    ) as raised:
        division_for(small, runtime, root=ROOT, model="small", must=False)
    assert raised.value.exit_code == 2
    assert ("none are used here" if gpus == 0 else f"of {gpus} here each") in raised.value.message


def test_a_registered_model_is_run_and_compared_on_its_ranks(workers: Workers, small: Path) -> None:
    config = RuntimeConfig(model=str(small), device="cpu", dtype="float32", max_seq_len=256)
    result = run(config, ROOT, world_size=2)
    assert (result["status"], result["error"]) == ("success", None)
    assert result["settings"]["world_size"] == 2
    assert result["comparison"]["agrees"]
    checks = {check["what"]: check for check in result["comparison"]["checks"]}
    assert checks["cached decode"]["error"] < checks["cached decode"]["limit"]


def test_the_mapping_of_a_configuration_is_followed(mixtral: Path) -> None:
    """Each rank has a half of every expert, where it has half of the experts otherwise."""
    runtime = RuntimeConfig(world_size=2, dist_mapping={"moe_tp": 2})  # type: ignore[arg-type]
    gm, _ = divided(mixtral, Ranks(0, 2), dist_mapping={"moe_tp": 2})
    whole, _ = divided(mixtral, Ranks(0, 1))
    name = "model.layers.0.mlp.experts.0.w1.weight"
    name = next(each for each, _ in whole.named_parameters() if ".experts." in each) or name
    assert 2 * gm.get_parameter(name).shape[0] == whole.get_parameter(name).shape[0]
    found = find_division(mixtral, runtime, gpu=False, root=ROOT)
    assert found.weights["moe"] == 3 * 8 * LAYERS


def test_every_step_of_the_pipeline_is_verified_on_two_ranks(
    workers: Workers, small: Path, seed: int
) -> None:
    settings = {**SETTINGS, "world_size": 2}
    report = verify_model(small, root=ROOT, device="cpu", seed=seed, settings=settings)
    assert report.passed, report.first_failure
    assert report.world_size == 2
    checks = {check.transform: check for check in report.checks}
    assert checks["apply_sharding_hints"].matched
    assert set(report.checks[-1].errors) == {
        "prefill", "chunked prefill", "decode", "batched decode"
    }  # fmt: skip
    assert any(fact.startswith("2 ranks divide ") for fact in report.facts)
    assert not workers.is_lost


@pytest.mark.exhaustive
def test_wrong_shares_are_found(
    workers: Workers, small: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's sums are its own summands here."""
    from onboard.verify.transforms import trial

    def without_sums(module: Any, prompts: Any, context: Any) -> Any:
        found = run_plain(module, prompts, context)
        halved = any(each.key == "apply_sharding_hints" for each in context.history)
        return [each * (0.5 if halved else 1.0) for each in found]

    run_plain = trial.run_plain
    monkeypatch.setattr(trial, "run_plain", without_sums)
    settings = {**SETTINGS, "world_size": 2}
    report = verify_model(small, root=ROOT, device="cpu", seed=seed, settings=settings)
    assert report.first_failure is not None
    assert report.first_failure.transform == "apply_sharding_hints"


def test_two_ranks_are_measured(workers: Workers, small: Path, seed: int) -> None:
    shapes = [Shape(2, 8, 5)]
    found = {}
    for ranks in (1, 2):
        settings = {"world_size": ranks}
        where = {"device": "cpu", "dtype": "auto", "mode": "graph"}
        with open_subject(
            str(small),
            ROOT,
            config=None,
            overrides=where,
            random_weights=False,
            settings=settings,
        ) as subject:
            found[ranks] = run_suite(subject, Settings(shapes, seed, repeats=1))
    alone, both = found[1], found[2]
    assert (alone.world_size, both.world_size) == (1, 2)
    for report in (alone, both):
        [result] = report.results
        assert result.measured is not None
        assert result.measured.decode_step > 0
        assert len(result.measured.decode_hits) == 2
    counts = [{each.count for each in report.work.weights.experts} for report in (alone, both)]
    assert counts == [{8}, {4}]
    assert both.work.weights.dense_bytes < 0.75 * alone.work.weights.dense_bytes
    mine, whole = (report.results[0].measured.decode_hits for report in (both, alone))  # type: ignore[union-attr]
    assert all(few <= all_ for few, all_ in zip(mine, whole, strict=True))


@pytest.mark.exhaustive
def test_the_judge_of_a_sweep_runs_two_ranks(workers: Workers, small: Path, seed: int) -> None:
    verdict = judge(small, ROOT, seed=seed, world_size=2)
    assert verdict.agrees, verdict.reason
    assert verdict.world_size == 2
    assert 0 < sum(verdict.divided.values()) <= verdict.weights
    refused = judge(small, ROOT, seed=seed, world_size=3)
    assert "cannot be divided among 3 ranks" in refused.refused
    assert refused.reason == refused.refused


def test_a_plan_says_what_each_rank_takes(
    mixtral: Path, division: Division, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(mixtral), "--root", str(ROOT), "--gpu", "80GiB", "--dtype", "float32"]
    documents = []
    for more in ([], ["--world-size", "2"]):
        assert main.run([*words, *more, "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    whole, own = (each["weights"] for each in documents)
    assert whole == division.whole_bytes
    assert own == division.rank_bytes
    assert str(division) in documents[1]["facts"][0]
    pages = [each["groups"][0]["bytes"] / each["groups"][0]["units"] for each in documents]
    assert pages[0] == 2 * pages[1]
    assert [each["gpus_needed"]["H100"] for each in documents] == [1, 2]  # each rank has its own


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "3", "--gpu", "80GiB"], "cannot be divided among 3 ranks"),
        (["--world-size", "2", "--gpu", "4x80GiB"], "names 4 GPUs for 2 ranks"),
    ],
)
def test_a_plan_of_ranks_that_cannot_be_is_refused(
    mixtral: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main.run(["plan", str(mixtral), "--root", str(ROOT), *words]) == 2
    assert message in capsys.readouterr().err


def test_run_says_what_is_divided_before_it_loads(
    workers: Workers, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(small), "--root", str(ROOT), "--device", "cpu", "--world-size"]
    prompt = ["--token-ids", "1,2,3", "--max-tokens", "2", "--set", "max_seq_len=64"]
    assert main.run([*words, "2", *prompt]) == 0
    said = capsys.readouterr().err
    assert said.startswith("2 ranks divide ")
    assert said.index("2 ranks divide ") < said.index("loaded") < said.index("rank 1: ")
    assert main.run([*words, "3", *prompt]) == 2
    refused = capsys.readouterr().err
    assert "cannot be divided among 3 ranks. World sizes that divide them: 2, 4" in refused
    assert "loaded" not in refused


@pytest.mark.parametrize(("own", "theirs"), [("", "1"), ("0", "1"), ("1", "2")])
def test_a_process_that_is_started_is_told_its_own_place_on_the_host(
    monkeypatch: pytest.MonkeyPatch, own: str, theirs: str
) -> None:
    """Torchrun says it to the process that starts it."""
    given: list[dict[str, str]] = []
    monkeypatch.setattr(links.subprocess, "Popen", lambda *_, env, **__: given.append(env) or None)
    if own:
        monkeypatch.setenv("LOCAL_RANK", own)
    else:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    links.start_process(1, 2).connection.close()
    assert given[0]["LOCAL_RANK"] == theirs
