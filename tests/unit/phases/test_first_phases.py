"""gather, survey, analyze and generate on a random checkpoint, one after the other and each for
itself.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onboard.analysis.spec import ModelSpec
from onboard.cli.progress import PlainObserver
from onboard.codegen import model_file
from onboard.codegen.hints.same_text import same_but_hints
from onboard.errors import ConsentRequiredError, EagerDiffersError, OnboardError, UsageError
from onboard.gpu import Memory
from onboard.hub import LocalSource
from onboard.workflow.checkpoint import parameter_count as size
from onboard.workflow.checkpoint.vocabulary import check_vocabulary
from onboard.workflow.outcome import PhaseOutcome
from onboard.workflow.phase import RunContext, RunOptions
from onboard.workflow.phase_runner import PhaseRunner, load_phase, open_run
from onboard.workflow.phases import gather, survey
from onboard.workflow.phases.generate import same_but_revision
from tests.support.checkpoints import edit_config, save_checkpoint, tree
from tests.support.hub_server import HubServer, Repository


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", shard_size="20KB")


def context(checkpoint: Path, root: Path, **options: Any) -> RunContext:
    return open_run(str(checkpoint), root, RunOptions(device="cpu", **options))


def run(run_context: RunContext, *names: str) -> dict[str, str]:
    artifacts = {}
    for name in names:
        result = load_phase(name).run(run_context)
        assert result.summary
        artifacts |= result.artifacts
    return artifacts


def true_parameters(checkpoint: Path) -> int:
    config = AutoConfig.from_pretrained(checkpoint)
    return sum(
        parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
    )


def test_gather(checkpoint: Path, tmp_path: Path) -> None:
    run_context = context(checkpoint, tmp_path)
    assert run(run_context, "gather") == {"gather": ".onboard/tiny/gather.json"}
    facts = run_context.read_json("gather.json")
    assert facts["parameters"] == true_parameters(checkpoint)
    assert facts["bytes"] == 4 * facts["parameters"]
    assert facts["weights"] == "checked"
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= facts[
        "files"
    ].keys()


def test_size_without_weights_is_that_of_the_config(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    edit_config(tmp_path, tie_word_embeddings=True)
    estimate = size.estimate_size(LocalSource(str(tmp_path)), "bfloat16")
    assert estimate.parameters == true_parameters(tmp_path)
    assert estimate.bytes == 2 * estimate.parameters
    assert "config" in estimate.basis


@pytest.mark.parametrize(
    ("counts", "dtype", "expected"),
    [
        ({"bfloat16": 100}, "auto", 200),
        ({"BF16": 100}, "float32", 400),
        ({"BF16": 100, "F8_E4M3": 1000, "I32": 10}, "float32", 1440),
        ({"float32": 100, "int64": 1, "uint8": 7}, "bfloat16", 215),
    ],
)
def test_bytes_in_the_dtype_of_the_run(
    counts: dict[str, int],
    dtype: str,
    expected: int,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(size, "local_counts", lambda _: counts)
    estimate = size.estimate_size(LocalSource(str(checkpoint)), dtype)
    assert (estimate.bytes, estimate.parameters) == (expected, sum(counts.values()))


def test_a_gpu_that_is_not_there_is_asked_for_in_vain(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "device_memory", lambda _: Memory(2**33, 2**33))
    run_context = open_run(str(checkpoint), tmp_path, RunOptions(device="cuda"))
    with pytest.raises(UsageError, match="this system has no GPU. Use --device cpu"):
        run(run_context, "gather")


def test_gather_depends_on_the_weights_of_a_folder(checkpoint: Path, tmp_path: Path) -> None:
    phase = load_phase("gather")
    before = phase.inputs(context(checkpoint, tmp_path))
    assert phase.inputs(context(checkpoint, tmp_path)) == before
    shard = next(checkpoint.glob("model-*.safetensors"))
    os.utime(shard, (1, 1))
    assert phase.inputs(context(checkpoint, tmp_path)) != before


def test_remote_code_that_transformers_has_itself_needs_no_consent(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"},
    }
    assert not gather.require_consent_for_code(config, tmp_path, trusted=False)
    with pytest.raises(ConsentRequiredError):
        gather.require_consent_for_code(
            {**config, "model_type": "nonesuch"}, tmp_path, trusted=False
        )
    assert gather.require_consent_for_code(
        {**config, "model_type": "nonesuch"}, tmp_path, trusted=True
    )


def test_survey_finds_what_is_there(checkpoint: Path, tmp_path: Path) -> None:
    run_context = context(checkpoint, tmp_path)
    run(run_context, "gather", "survey")
    assert (
        run_context.read_json("survey.json")["plan"]
        == "check models/modeling_llama.py against it (shipped)"
    )
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "modeling_llama.py").touch()
    (tmp_path / "registry").mkdir()
    kinds = {
        "a/tiny-7B": "qwen2",
        "b/other": "llama",
        "b/class": "llama\n    architecture: OtherForCausalLM",
    }
    entries = "".join(
        f"  - name: {n}\n    config_id: x\n    yaml_extra: []\n    family: {k}\n"
        for n, k in kinds.items()
    )
    (tmp_path / "registry" / "models.yaml").write_text(f"models:\n{entries}")
    run(run_context, "survey")
    facts = run_context.read_json("survey.json")
    assert facts["model_file"] == {
        "path": "models/modeling_llama.py",
        "where": "root",
        "users": True,
    }
    assert facts["registered"] == ["b/other"], "by what it is, not by its name"
    assert facts["plan"].startswith(
        "check models/modeling_llama.py against it (root); no run here wrote it"
    )
    absent = survey.existing_model_file(tmp_path, "nonesuch")
    new = {
        "family": "nonesuch",
        "model_file": absent,
        "missing": ["b/nonesuch-1B", "b/nonesuch-7B"],
    }
    assert (
        survey.plan(new)
        == "write models/modeling_nonesuch.py; 2 more sizes of the family are registered, untested"
    )


def test_analyze_and_generate(checkpoint: Path, tmp_path: Path) -> None:
    run_context = context(checkpoint, tmp_path)
    artifacts = run(run_context, "gather", "analyze", "generate")
    assert artifacts["spec"] == ".onboard/tiny/spec.yaml"
    assert artifacts["model_file"] == "models/modeling_llama.py"
    assert run_context.spec == ModelSpec.load(tmp_path / artifacts["spec"])
    head, _, _ = (tmp_path / artifacts["spec"]).read_text().partition("\n")
    schema = json.loads(
        (tmp_path / artifacts["spec"]).with_name(head.partition("$schema=")[2]).read_text()
    )
    kinds = schema["properties"]["blocks"]["items"]["discriminator"]["mapping"]
    assert {block.kind for block in run_context.spec.blocks} < kinds.keys(), (
        "what an editor may complete"
    )
    assert "class LlamaForCausalLM" in (tmp_path / artifacts["model_file"]).read_text()


def test_a_class_whose_eager_attention_is_another_model_is_sent_to_no_mode(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4, "multi_query": False, "parallel_attn": False}
    folder = save_checkpoint(tmp_path / "tiny", "falcon", alibi=True, **sizes)
    eager, usual = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)
        for name in ("eager", "sdpa")
    )
    ids = torch.randint(0, eager.config.vocab_size, (1, 40))
    assert not torch.allclose(eager(ids).logits, usual(ids).logits, rtol=1e-3)
    run_context = context(folder, tmp_path / "root")
    run(run_context, "gather", "survey", "analyze")
    with pytest.raises(EagerDiffersError, match="with sdpa attention, which users get") as caught:
        run(run_context, "generate")
    assert "No mode runs it" in str(caught.value)
    assert "modeling_falcon.py" in caught.value.message


def test_a_wrong_file_is_not_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_context = context(checkpoint, tmp_path)
    run(run_context, "gather", "analyze")
    before = tree(tmp_path)
    generate_model_file = model_file.generate_model_file

    def wrong(spec: ModelSpec) -> str:
        text = generate_model_file(spec)
        assert "torch_rmsnorm" in text
        return text.replace("torch_rmsnorm(", "torch_rmsnorm(0.5 * ")

    monkeypatch.setattr(model_file, "generate_model_file", wrong)
    with pytest.raises(OnboardError):
        run(run_context, "generate")
    assert tree(tmp_path) == before


def test_a_relatives_file_is_kept_when_it_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    run_context = context(checkpoint, tmp_path)
    run(run_context, "gather", "analyze", "generate")
    path = tmp_path / "models" / "modeling_llama.py"
    other = path.read_text().replace('.\n"""', ', checkpoint revision 0123abc.\n"""', 1)
    path.write_text(other)
    run(run_context, "generate")
    assert path.read_text() == other


def test_a_file_that_a_relative_needs_otherwise_is_not_replaced(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relative's spec says llama, too, but its model has biases that the new file leaves
    out.
    """
    run_context = context(checkpoint, tmp_path)
    run(run_context, "gather", "analyze", "generate")
    relative = tmp_path / ".onboard" / "relative" / "spec.yaml"
    relative.parent.mkdir()
    spec = run_context.spec.model_copy(update={"model": "acme/relative"})
    spec.config["attention_bias"] = True
    spec.save(relative)
    path = tmp_path / "models" / "modeling_llama.py"
    kept = path.read_text() + "# the relative's file\n"
    path.write_text(kept)
    run_context.files.claim(path)  # as the relative's own run does
    generate_model_file = model_file.generate_model_file
    monkeypatch.setattr(
        model_file,
        "generate_model_file",
        lambda spec: generate_model_file(spec).replace("bias=config.attention_bias", "bias=False"),
    )
    with pytest.raises(OnboardError, match="does not serve acme/relative, which shares it"):
        run(run_context, "generate")
    assert path.read_text() == kept
    path.write_text("of no use to either\n")
    run_context.files.claim(path)
    run(run_context, "generate")
    assert "bias=False" in path.read_text()


def test_a_users_model_file_is_kept_proven_and_only_replaced_when_asked(
    checkpoint: Path, tmp_path: Path
) -> None:
    """One that no run wrote, one that does not serve the model, and one that was edited after it
    was generated.
    """

    def generate(from_: str | None = None) -> PhaseOutcome:
        self = context(checkpoint, tmp_path)
        phases = [load_phase(name) for name in ("gather", "survey", "analyze", "generate")]
        outcome = PhaseRunner(phases, PlainObserver()).run(self, from_=from_)
        assert len(outcome.phases) == 4, outcome.phases[-1].error
        return outcome.phases[-1]

    text = model_file.generate_model_file(first_spec(checkpoint, tmp_path / "elsewhere"))
    path = tmp_path / "models" / "modeling_llama.py"
    path.parent.mkdir()
    mine = f"{text}# mine\n"
    path.write_text(mine)
    first = generate()
    assert first.status == "done"
    assert first.summary.startswith(
        "kept models/modeling_llama.py, which is not as onboard wrote it (--from generate"
    )
    assert (
        "kept where it differs"
        in json.loads((tmp_path / ".onboard/tiny/survey.json").read_text())["plan"]
    )
    again = generate()
    assert (again.status, path.read_text()) == ("skipped", mine)
    assert "kept models/modeling_llama.py" in again.summary
    path.write_text(mine.replace("torch_rmsnorm(", "torch_rmsnorm(0.5 * "))
    wrong = generate()
    assert (wrong.status, "does not serve the model" in wrong.error) == ("failed", True)
    path.write_text(mine)
    assert generate().status == "done"
    assert generate("generate").status == "done"
    assert same_but_hints(path.read_text(), text)
    [backup] = path.parent.glob("*.bak-*")
    assert backup.read_text() == mine
    assert generate().summary == "unchanged"
    path.write_text(f"{path.read_text()}# edited\n")
    assert "kept models/modeling_llama.py" in generate().summary


def first_spec(checkpoint: Path, root: Path) -> ModelSpec:
    run_context = context(checkpoint, root)
    run(run_context, "gather", "analyze")
    return run_context.spec


def test_same_but_revision() -> None:
    header = '"""A.\n\nfrom x.py sha256 0{}.\n"""\n'
    assert same_but_revision(header.format(""), header.format(", checkpoint revision 0a-b"))
    assert not same_but_revision(header.format(""), header.format("1, checkpoint revision 0a-b"))
    assert not same_but_revision(header.format(""), header.format("") + "x = 1\n")


def test_an_edited_spec_that_is_no_spec_is_explained(checkpoint: Path, tmp_path: Path) -> None:
    run_context = context(checkpoint, tmp_path)
    run(run_context, "gather", "analyze")
    path = tmp_path / ".onboard" / "tiny" / "spec.yaml"
    for text, message in (
        ("family: [", "not valid"),
        (path.read_text() + "extra: 1\n", "extra: Extra inputs"),
    ):
        path.write_text(text)
        with pytest.raises(OnboardError, match=message):
            _ = run_context.spec


def test_a_sizeable_model_is_judged_before_its_weights_are_fetched(
    checkpoint: Path, tmp_path: Path
) -> None:
    """In a process of its own: the Hub's client reads the endpoint once."""
    import subprocess
    import sys

    program = f"""
from pathlib import Path
from onboard import gpu
gpu.system_memory = lambda: gpu.Memory(1000, 1000)
from onboard.workflow.phase_runner import PhaseRunner, open_run, load_phase
from onboard.workflow.phase import RunOptions
from onboard.cli.progress import PlainObserver
phase = load_phase("gather")
phase.needs_weights = True
context = open_run("acme/tiny", Path({str(tmp_path / "root")!r}), RunOptions(device="cpu", yes=YES))
outcome = PhaseRunner([phase], PlainObserver()).run(context)
print(outcome.phases[0].error, [(facts["size_from"], facts["memory"]) for facts in
      ([context.read_json("gather.json")] if outcome.status == "done" else [])])
"""
    with HubServer({"acme/tiny": Repository(checkpoint)}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        for consent in (False, True):
            command = [sys.executable, "-c", program.replace("YES", str(consent))]
            process = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            )
            fetched = {name for name in hub.downloads() if name.endswith(".safetensors")}
            if consent:
                assert (
                    "('safetensors metadata of the Hub', 'exceeds 1e-06 GB of system memory"
                    in process.stdout
                )
                assert fetched == {path.name for path in checkpoint.glob("*.safetensors")}
            else:
                assert (
                    "This model requires ~8.7e-05 GB but the system only has 1e-06 GB"
                    in process.stdout
                )
                assert not (tmp_path / "root").exists()


def test_json_of_an_outcome_is_json() -> None:
    from onboard.workflow.outcome import RunOutcome

    outcome = RunOutcome(
        "m", Path("/r"), [PhaseOutcome("gather", "done", 1.23456, artifacts={"a": "b"})]
    )
    document = json.loads(json.dumps(outcome.document()))
    assert document["phases"][0]["seconds"] == 1.235
    assert document["artifacts"] == {"a": "/r/b"}


def test_non_finite_weights_are_named(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from onboard.workflow.checkpoint.usable_weights import check_weights

    save_file(
        {"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")])},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(OnboardError, match="the weight bad of .* holds NaN"):
        check_weights(tmp_path)
    check_weights(checkpoint)
    mask = torch.full((1, 1, 5, 5), float("-inf")).triu(1)
    save_file({"good": torch.ones(3), "mask": mask}, tmp_path / "model.safetensors")
    check_weights(tmp_path)
    mask[..., 3, 2] = float("-inf")
    save_file({"good": torch.ones(3), "mask": mask}, tmp_path / "model.safetensors")
    with pytest.raises(OnboardError, match="the weight mask of .* holds infinity"):
        check_weights(tmp_path)


def test_token_ids_that_the_model_lacks_are_said(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "tiny"))
    config = json.loads((folder / "config.json").read_text())
    assert check_vocabulary(folder, config, generates=True) == []
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [2, 97], "pad_token_id": 99, "bos_token_id": -1}'
    )
    facts = check_vocabulary(folder, config | {"vocab_size": 40}, generates=True)
    assert facts[:2] == [
        f"{name} is outside the vocabulary of 40" for name in ("eos_token_id 97", "pad_token_id 99")
    ]
    assert facts[2].startswith("the tokenizer has ids up to 6")
    assert len(facts) == 3
    (folder / "tokenizer.json").write_text("{")
    assert "does not load" in check_vocabulary(folder, config, generates=False)[0]
    with pytest.raises(OnboardError, match="does not load"):
        check_vocabulary(folder, config, generates=True)
