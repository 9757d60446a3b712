from __future__ import annotations

import pytest

from onboard.analysis.spec import Trait
from onboard.cli.progress import PlainObserver
from onboard.content import CONTENT_ROOT
from onboard.errors import OnboardError
from onboard.workflow.phase import RunContext
from onboard.workflow.phase_runner import PhaseRunner
from onboard.workflow.phases.matrix import Matrix
from onboard.workflow.phases.register import Register
from onboard.workflow.registry_results import KNOWN_PREFIX
from onboard.workflow.reporting.support_matrix import empty_matrix, matrix_path
from tests.support.phases import ContextFactory, make_run


def _onboarded(context_for: ContextFactory, model: str, **changes: object) -> RunContext:
    run_changes = changes.pop("run", {})
    context = context_for(model, **changes)
    Register().run(context)
    context.write_json("run.json", make_run(**run_changes))  # type: ignore[arg-type]
    Matrix().run(context)
    return context


def _rows(context: RunContext, column: int = 1) -> list[str]:
    lines = matrix_path(context.root).read_text().splitlines()
    return [line.split(" | ")[column].strip("| ") for line in lines if line.startswith("| `")]


def test_rows_are_sorted_by_architecture_and_footnotes_lead_to_the_configs(
    context_for: ContextFactory,
) -> None:
    for model, architecture in (
        ("a/q", "Qwen2ForCausalLM"),
        ("a/l", "LlamaForCausalLM"),
        ("b/l", "LlamaForCausalLM"),
    ):
        context = _onboarded(context_for, model, architecture=architecture)
    assert _rows(context) == ["a/l", "b/l", "a/q"]
    text = matrix_path(context.root).read_text()
    assert text.index("[^b--l]: [configs/b--l.yaml](configs/b--l.yaml)") < text.index(
        "[^q]: [configs/q.yaml]"
    )
    for name in ("l", "b--l", "q"):
        assert (context.root / "registry" / "configs" / f"{name}.yaml").exists()


def test_a_second_run_changes_nothing_and_edits_survive(context_for: ContextFactory) -> None:
    context = _onboarded(context_for, "a/l")
    path = matrix_path(context.root)
    path.write_text(path.read_text().replace("## Models", "A remark of mine.\n\n## Models"))
    before = path.read_text()
    Matrix().run(context)
    assert path.read_text() == before
    _onboarded(context_for, "a/m")
    assert "A remark of mine." in path.read_text()


def test_verified_devices_add_up(context_for: ContextFactory) -> None:
    _onboarded(context_for, "a/l")
    context = _onboarded(
        context_for, "a/l", run={"device": "cuda", "dtype": "bfloat16", "graphs": True}
    )
    assert _rows(context, 4) == ["cpu float32; cuda bfloat16"]
    context = _onboarded(context_for, "a/l")
    assert _rows(context, 4) == ["cpu float32; cuda bfloat16"]
    assert "| a/l | Yes | Yes |" in matrix_path(context.root).read_text(), (
        "a CPU run does not take CUDA graphs back"
    )


def test_a_judged_text_replaces_one_that_was_not(context_for: ContextFactory) -> None:
    context = _onboarded(context_for, "a/l", run={"verdict": "not judged"})
    assert _rows(context, 4) == ["cpu float32, text not judged"]
    assert _rows(_onboarded(context_for, "a/l"), 4) == ["cpu float32"]


def test_only_what_ran_says_yes(context_for: ContextFactory) -> None:
    context = _onboarded(context_for, "a/l", run={"agrees": False, "status": "bad_generation"})
    assert (
        "| a/l | Untested | Untested | Untested | Untested | N/A | Untested | N/A |"
        in matrix_path(context.root).read_text()
    )
    assert _rows(context, 4)[0].startswith("failed on 20")


@pytest.mark.parametrize(("window", "expected"), [(8, "Yes"), (4096, "Untested"), (None, "N/A")])
def test_a_window_counts_when_the_run_was_longer(
    context_for: ContextFactory, window: int, expected: str
) -> None:
    context = context_for("a/l")
    traits = context.spec.traits | {"sliding_window": {"value": window, "evidence": "config.json"}}
    context = _onboarded(context_for, "a/l", traits=traits)
    assert (
        f"| a/l | Untested | Yes | Untested | Untested | {expected} |"
        in matrix_path(context.root).read_text()
    )


def test_a_prefix_counts_as_reused_when_a_run_has_checked_it(context_for: ContextFactory) -> None:
    context = _onboarded(context_for, "a/l")
    run = make_run()
    checks = run["runs"]["full"]["comparison"]["checks"]
    checks.append(checks[0] | {"what": KNOWN_PREFIX})
    context.write_json("run.json", run)
    Matrix().run(context)
    assert (
        "| a/l | Untested | Yes | Untested | Yes | N/A |" in matrix_path(context.root).read_text()
    )


@pytest.mark.parametrize(("ranks", "expected"), [(1, "Untested"), (2, "Yes")])
def test_ranks_count_when_a_run_had_several(
    context_for: ContextFactory, ranks: int, expected: str
) -> None:
    context = _onboarded(context_for, "a/l")
    run = make_run()
    run["runs"]["full"]["settings"]["world_size"] = ranks
    context.write_json("run.json", run)
    Matrix().run(context)
    assert f"| N/A | {expected} | N/A |" in matrix_path(context.root).read_text()


def test_a_matrix_of_before_gets_the_column_that_it_lacks(context_for: ContextFactory) -> None:
    context = _onboarded(context_for, "a/l")
    path = matrix_path(context.root)
    new = path.read_text()
    head, rule = "| Chunked prefill | Prefix reuse |", "|---|---|---|---|---|---|---|---|"
    old = new.replace(head, "| Chunked prefill |").replace(rule, rule[:-4])
    old = old.replace(
        "| a/l | Untested | Yes | Untested | Untested |", "| a/l | Untested | Yes | Untested |"
    )
    assert len(old.splitlines()) == len(new.splitlines())
    assert old.count("Untested") == new.count("Untested") - 1
    path.write_text(old)
    _onboarded(context_for, "a/m")
    assert path.read_text() != old
    path.write_text(old)
    Matrix().run(context)
    assert path.read_text() == new


def test_a_hostile_name_cannot_break_the_table(context_for: ContextFactory) -> None:
    hostile = Trait(value="x|y\n| z | <script>`", evidence="edited by hand")
    context = _onboarded(context_for, "a/l", traits={"attention": hostile})
    lines = [line for line in matrix_path(context.root).read_text().splitlines() if "a/l" in line]
    assert lines[0].count(" | ") == 5
    assert "<script>" not in lines[0]


def test_a_matrix_without_its_table_is_refused(context_for: ContextFactory) -> None:
    context = _onboarded(context_for, "a/l")
    matrix_path(context.root).write_text("# Mine\n")
    with pytest.raises(OnboardError, match="no table under"):
        Matrix().run(context)
    assert matrix_path(context.root).read_text() == "# Mine\n"


def test_a_new_root_starts_without_the_shipped_rows() -> None:
    shipped = (CONTENT_ROOT / "registry" / "supported_models.md").read_text()
    assert not [line for line in empty_matrix().splitlines() if line not in shipped.splitlines()]
    assert "[^" not in empty_matrix()
    assert len([line for line in empty_matrix().splitlines() if line.startswith("|")]) == 4


def test_rows_of_other_models_are_no_edits_that_stop_a_rerun(context_for: ContextFactory) -> None:
    context = _onboarded(context_for, "a/l")
    engine = PhaseRunner([Matrix()], PlainObserver())
    assert engine.run(context).status == "done"
    _onboarded(context_for, "b/m")
    assert engine.run(context).phases[0].status == "skipped"
    context.write_json("run.json", make_run(device="cuda"))
    [outcome] = engine.run(context).phases
    assert (outcome.status, outcome.error) == ("done", "")
    assert "b/m" in matrix_path(context.root).read_text()
