from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from onboard import registry
from onboard.composition import compose
from onboard.errors import OnboardError, UsageError
from onboard.registry_text import set_fields
from onboard.runtime.llm import LLM
from onboard.workflow.phase import PhaseResult, RunContext
from onboard.workflow.phases.register import Register
from onboard.workflow.registry_status import _record, recorded
from onboard.workflow.reporting.support_matrix import matrix_path
from tests.support.checkpoints import MODEL_FILE, save_checkpoint
from tests.support.phases import ContextFactory, make_context


def test_a_model_gets_an_entry_and_a_config_that_agree(context_for: ContextFactory) -> None:
    context = context_for("org/Tiny-Llama", num_parameters=7_000_000_000)
    Register().run(context)
    entry = registry.find_entry("org/Tiny-Llama", context.root)
    assert entry is not None
    assert entry.yaml_extra == ["dashboard_default.yaml", "world_size_1.yaml", "tiny-llama.yaml"]
    config = registry.load_standalone(registry.config_path(context.root, "tiny-llama"))
    assert config == compose(entry, context.root)
    assert (config.model, config.dtype, config.world_size) == ("org/Tiny-Llama", "auto", 1)
    assert config.max_seq_len is None, "as the model and the memory allow"


def test_a_model_that_one_gpu_does_not_hold_is_registered_with_the_fewest_that_do(
    context_for: ContextFactory,
) -> None:
    """Its size is said to be one of 160 GB in float32, of which two hold a half each."""
    context = context_for("org/Tiny-Llama", num_parameters=40_000_000_000)
    (context.root / "config.json").write_text(json.dumps(context.spec.config))
    said = Register().run(context).summary
    assert "world size 2: 2 x H100 hold it and a sequence of 96 tokens" in said
    entry = registry.find_entry("org/Tiny-Llama", context.root)
    assert entry is not None
    assert entry.yaml_extra == ["dashboard_default.yaml", "world_size_2.yaml", "tiny-llama.yaml"]
    config = registry.load_standalone(registry.config_path(context.root, "tiny-llama"))
    assert config == compose(entry, context.root)
    assert config.world_size == 2
    before = registry.models_path(context.root).read_bytes()
    Register().run(context)
    assert registry.models_path(context.root).read_bytes() == before


def test_a_length_that_all_models_get_is_bounded_by_the_models_positions(
    context_for: ContextFactory,
) -> None:
    context = context_for("org/Tiny-Llama")
    path = registry.config_path(context.root, "dashboard_default")
    path.parent.mkdir(parents=True)
    path.write_text("max_seq_len: 512\n")
    Register().run(context)
    assert (
        registry.load_standalone(registry.config_path(context.root, "tiny-llama")).max_seq_len == 96
    )


class _Trial:
    """A phase whose run ends as it is told."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    @recorded
    def run(self, context: RunContext) -> PhaseResult:
        assert _entry(context).status == "pending"
        if self.error is not None:
            raise self.error
        return PhaseResult()


def _entry(context: RunContext) -> registry.RegistryEntry:
    return registry.load_entries(context.root)[0]


def test_an_entry_says_what_came_of_the_run(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    Register().run(context)
    assert _entry(context).status == "pending"
    path = context.root / "models" / "modeling_llama.py"
    path.parent.mkdir()
    path.write_text("LLAMA = 1\n")
    _Trial(None).run(context)
    passed = _entry(context)
    assert (passed.status, passed.model_file) == ("passed", registry.digest(path))
    assert passed.tested is not None
    Register().run(context)
    assert _entry(context) == passed, "registering again leaves the verdict"
    with pytest.raises(OnboardError):
        _Trial(OnboardError("bad text")).run(context)
    assert _entry(context).status == "failed"
    assert "| failed on 2" in matrix_path(context.root).read_text()
    with pytest.raises(KeyboardInterrupt):
        _Trial(KeyboardInterrupt()).run(context)
    assert _entry(context).status == "pending", "an interrupted run tells nothing"
    context.options.dry_run = True
    registry.models_path(context.root).unlink()
    with pytest.raises(IndexError):
        _Trial(None).run(context)
    assert not registry.models_path(context.root).exists()


def test_a_removed_entry_stays_removed(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    Register().run(context)
    registry.models_path(context.root).write_text(registry.HEADER)
    _record(context, "passed")
    assert registry.models_path(context.root).read_text() == registry.HEADER


def test_a_model_that_has_not_passed_is_not_served_silently(tmp_path: Path) -> None:
    checkpoint, root = save_checkpoint(tmp_path / "tiny"), tmp_path / "root"
    shutil.copytree(MODEL_FILE.parent, root / "models")
    Register().run(make_context(root, str(checkpoint)))
    doubt = "no run of tiny has passed (its registry entry is pending)"
    with pytest.raises(OnboardError) as error:
        LLM(checkpoint, root=root, device="cpu", strict=True)
    assert error.value.message == doubt
    assert doubt in LLM(checkpoint, root=root, device="cpu").engine.facts
    path = registry.models_path(root)
    path.write_text(set_fields(path.read_text(), "tiny", {"status": "passed"}))
    assert not [
        fact for fact in LLM(checkpoint, root=root, device="cpu").engine.facts if "run of" in fact
    ]


def test_a_second_run_changes_nothing(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    Register().run(context)
    before = {path: path.read_bytes() for path in context.root.rglob("*.yaml")}
    Register().run(context)
    assert {path: path.read_bytes() for path in context.root.rglob("*.yaml")} == before
    assert context.read_json("registration.json")["entry_status"] == "already there"


def test_a_config_that_came_with_the_root_is_kept_and_a_broken_one_is_refused(
    context_for: ContextFactory,
) -> None:
    context = context_for("org/tiny")
    Register().run(context)
    context.artifact("registration.json").unlink()
    path = registry.config_path(context.root, "tiny")
    edited = path.read_text() + "skip_loading_weights: true\n"
    path.write_text(edited)
    Register().run(context)
    assert path.read_text() == edited
    assert context.read_json("registration.json")["config_status"] == "kept as it was"
    context.artifact("registration.json").unlink()
    path.write_text(edited.replace("skip_loading", "skip_load"))
    with pytest.raises(UsageError, match="skip_loading_weights"):
        Register().run(context)


def test_our_own_older_config_is_renewed(context_for: ContextFactory) -> None:
    context = context_for("org/tiny")
    Register().run(context)
    context.options.dtype = "bfloat16"
    Register().run(context)
    assert registry.load_standalone(registry.config_path(context.root, "tiny")).dtype == "bfloat16"


def test_a_local_folder_is_registered_under_its_name(
    context_for: ContextFactory, tmp_path: Path
) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    context = context_for(str(folder))
    Register().run(context)
    assert [entry.name for entry in registry.load_entries(context.root)] == ["My Model"]
    assert registry.load_standalone(registry.config_path(context.root, "my_model")).model == str(
        folder
    )


def test_family_members_are_those_with_the_same_architecture(context_for: ContextFactory) -> None:
    for model, architecture in (
        ("a/one", "LlamaForCausalLM"),
        ("a/two", "Qwen2ForCausalLM"),
        ("a/three", "LlamaForCausalLM"),
    ):
        context = context_for(model, architecture=architecture)
        Register().run(context)
    assert context.read_json("registration.json")["family"] == ["a/one"]


def test_a_dry_run_writes_nothing(context_for: ContextFactory) -> None:
    context = context_for("org/tiny", dry_run=True)
    Register().run(context)
    assert not (context.root / "registry").exists()
    assert registry.models_path(context.root) in context.files.pending


def _register(root: Path, model: str) -> None:
    Register().run(make_context(root, model))


def test_two_models_at_once_are_both_registered(tmp_path: Path) -> None:
    forks = multiprocessing.get_context("fork")
    models = ["org1/Same", "org2/Same"]
    processes = [forks.Process(target=_register, args=(tmp_path, model)) for model in models]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(entry.name for entry in registry.load_entries(tmp_path)) == models
    for model in models:
        entry = registry.find_entry(model, tmp_path)
        assert entry is not None
        assert compose(entry, tmp_path).model == model
