"""Ten faults in a generated model file: an agent that knows the patch mends each, one that does not
changes nothing; what it proposes is vetted, proven and tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2MoeConfig

from onboard.agents.patch import diff_of
from onboard.agents.role_runs import load_runs
from onboard.agents.role_settings import AgentsSettings, Command
from onboard.analysis.analyze import analyze
from onboard.analysis.spec import ModelSpec
from onboard.codegen.hints.hinted_text import hinted
from onboard.codegen.model_file import generate_model_file
from onboard.errors import OnboardError
from onboard.verify.blocks import prove
from onboard.workflow import team
from onboard.workflow.files import FileWriter
from onboard.workflow.phase import RunContext, RunOptions
from onboard.workflow.phases import test as phase
from onboard.workflow.phases.generate import Generate
from onboard.workflow.phases.review import ReviewPhase
from onboard.workflow.remote import client
from onboard.workflow.remote.tasks import TASKS
from onboard.workflow.worklog import Worklog
from tests.support.assignments import scripted
from tests.support.phases import FolderSource

MODEL = "models/modeling_qwen2_moe.py"
NORM = "        hidden_states = self.input_layernorm(hidden_states)\n"
MIX = "        hidden_states = self.self_attn(hidden_states, position_embeddings)\n"
ATTENTION, LAYER = "Qwen2MoeAttention", "Qwen2MoeDecoderLayer"


@dataclass(frozen=True)
class Fault:
    right: str
    wrong: str
    block: str
    """The class that the repairer is told of first."""


FAULTS = {
    "scale": Fault("self.head_dim**-0.5", "self.head_dim**-0.25", ATTENTION),
    "norm order": Fault(f"{NORM}{MIX}", f"{MIX}{NORM}", ATTENTION),
    "missing bias": Fault(
        "attention_heads_dim, bias=config.qkv_bias)", "attention_heads_dim, bias=False)", ATTENTION
    ),
    "gate and up": Fault("w1, w2, w3, act_fn", "w3, w2, w1, act_fn", "Qwen2MoeExperts"),
    "rotary half": Fault(
        "torch.cat((freqs, freqs), dim=-1)",
        "torch.stack((freqs, freqs), dim=-1).flatten(-2)",
        "Qwen2MoeRotaryEmbedding",
    ),
    "window": Fault(
        "sliding_window=self.config.sliding_window\n",
        "sliding_window=self.config.sliding_window + 1\n",
        ATTENTION,
    ),
    "router": Fault("if self.norm_topk_prob:", "if not self.norm_topk_prob:", "Qwen2MoeTopKRouter"),
    "tied head": Fault(
        "if config.tie_word_embeddings:", "if not config.tie_word_embeddings:", "Qwen2MoeModel"
    ),
    "residual scale": Fault(
        "return residual + hidden_states", "return residual + 0.5 * hidden_states", LAYER
    ),
    "expert order": Fault(
        "expert.gate_proj.weight for expert in self",
        "expert.gate_proj.weight for expert in list(self)[::-1]",
        "Qwen2MoeExperts",
    ),
}

ALWAYS = ("window", "expert order")


@dataclass(frozen=True)
class Generated:
    config: dict[str, Any]
    spec: ModelSpec
    text: str

    def with_fault(self, name: str) -> str:
        fault = FAULTS[name]
        assert self.text.count(fault.right) == 1
        return self.text.replace(fault.right, fault.wrong)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    """A mixture with biases, and a window in one of its layers."""
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        max_position_embeddings=64,
        architectures=["Qwen2MoeForCausalLM"],
    )
    values = json.loads(json.dumps(config.to_diff_dict())) | {"model_type": config.model_type}
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(values))
    spec = analyze(values, folder, model="acme/mixture", revision=None)
    return Generated(values, spec, generate_model_file(spec))


Make = Callable[[Command], RunContext]


@pytest.fixture
def make(tmp_path: Path, generated: Generated) -> Make:
    def context(settings: Command) -> RunContext:
        root, folder = tmp_path / "root", tmp_path / "checkpoint"
        work_dir = root / ".onboard" / "mixture"
        work_dir.mkdir(parents=True)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(generated.config))
        generated.spec.save(work_dir / "spec.yaml")
        return RunContext(
            "acme/mixture",
            root,
            work_dir,
            RunOptions(device="cpu", agents=AgentsSettings(repairer=settings)),
            FileWriter(root=root),
            Worklog(work_dir / "worklog.md"),
            FolderSource(folder, generated.config),  # type: ignore[arg-type]
        )

    return context


@pytest.fixture
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prove in this process what has been vetted: with walls it is the same, and takes longer."""

    def in_walls(context: RunContext, task: str, **arguments: Any) -> Any:
        return TASKS[task](Path(), {}, **arguments)

    monkeypatch.setattr(client, "in_walls", in_walls)


def says(files: dict[str, str], before: dict[str, str]) -> Command:
    answer = json.dumps({"explanation": "as transformers has it", "diff": diff_of(before, files)})
    return scripted(f"print({answer!r})")


def problem_of(text: str, spec: ModelSpec) -> str:
    with pytest.raises(OnboardError) as caught:
        prove(text, spec, export=False)
    return caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.exhaustive])
        for name in FAULTS
    ],
)
@pytest.mark.usefixtures("_in_this_process")
def test_a_fault_is_mended_by_an_agent_that_knows_the_patch(
    generated: Generated, make: Make, name: str
) -> None:
    faulty = generated.with_fault(name)
    problem = problem_of(faulty, generated.spec)
    context = make(says({MODEL: generated.text}, {MODEL: faulty}))
    assert team.repaired(context, faulty, problem) == generated.text
    (run,) = load_runs(context.work_dir)
    assert (run.status, run.before) == ("done", problem)
    assert run.after.startswith("every block, and the logits, are transformers': largest error ")
    assert run.about.startswith(f"repair {FAULTS[name].block}: ")
    log = (context.work_dir / "worklog.md").read_text()
    assert f"- Before: {problem}" in log
    assert "```diff\n" in log
    # A phase that is repeated comes to the same run again, and logs nothing twice.
    assert team.repaired(context, faulty, problem) == generated.text
    (entry,) = context.worklog.entries()
    assert (entry["role"], entry["status"], entry["attempts"]) == ("repairer", "done", 1)
    assert (context.work_dir / "worklog.md").read_text() == log


CHEATS = {
    "a wrong patch": ("**-0.25", "**-0.75", "differs from transformers"),
    "another import": ("import torch\n", "import torch\nimport os\n", "not known to be harmless"),
    "a file is read": (
        "return self.o_proj(",
        'torch.load("x.pt")\n        return self.o_proj(',
        "not known to be harmless",
    ),
    "transformers itself": (
        "from transformers.activations import ACT2FN",
        "from transformers.models.qwen2_moe.modeling_qwen2_moe import ACT2FN",
        "not known to be harmless",
    ),
    "another class is registered": (
        'register_causal_lm("Qwen2MoeConfig"',
        'register_causal_lm("LlamaConfig"',
        "registers other classes",
    ),
}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.usefixtures("_in_this_process")
def test_a_proposal_that_is_wrong_or_reaches_further_is_not_kept(
    generated: Generated, make: Make, name: str
) -> None:
    old, new, reason = CHEATS[name]
    faulty = generated.with_fault("scale")
    context = make(says({MODEL: faulty.replace(old, new, 1)}, {MODEL: faulty}))
    with pytest.raises(OnboardError, match=reason):
        team.repaired(context, faulty, "model.layers.0.self_attn.o_proj (Linear) differs")
    (run,) = load_runs(context.work_dir)
    assert (run.status, run.files) == ("failed", {})


@pytest.mark.usefixtures("_in_this_process")
def test_a_spec_says_what_was_found_and_not_which_model_it_is(
    generated: Generated, make: Make
) -> None:
    spec = generated.spec.to_yaml()
    faulty = generated.with_fault("scale")
    other = spec.replace("model: acme/mixture", "model: acme/other")
    context = make(says({"spec.yaml": other}, {"spec.yaml": spec}))
    with pytest.raises(OnboardError, match="model is not yours to change"):
        team.repaired(context, faulty, "model.layers.0.self_attn.o_proj (Linear) differs")
    assert context.files.read(context.artifact("spec.yaml")) == spec


def test_without_a_repairer_nobody_is_asked(generated: Generated, make: Make) -> None:
    context = make(scripted("pass"))
    context.options.agents = AgentsSettings()
    assert team.repaired(context, generated.text, "it differs") is None
    assert load_runs(context.work_dir) == []


@pytest.mark.exhaustive
def test_what_the_review_fails_is_mended_and_reviewed_again(
    generated: Generated, make: Make
) -> None:
    """The proof does not see a missing assertion, and the contract does."""
    faulty = generated.text.replace("        assert position_ids is not None\n", "")
    context = make(says({MODEL: generated.text}, {MODEL: faulty}))
    context.files.put(context.root / MODEL, faulty)
    context.files.put(context.root / phase.test_path(context), phase.tests_text(context))
    result = ReviewPhase().run(context)
    assert result.summary.endswith("iterations: 2")
    assert context.read_json("review.json")["iterations"] == 2
    assert (context.root / MODEL).read_text() == generated.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["window", "expert order"])
def test_the_phases_mend_a_model_file_behind_walls(
    generated: Generated, make: Make, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the walls: the generator makes a fault, and an edited file has one, of which the tests
    say so.
    """
    faulty = generated.with_fault(name)
    context = make(says({MODEL: generated.text}, {MODEL: faulty}))
    made = "onboard.codegen.model_file.generate_model_file"
    monkeypatch.setattr(made, lambda *_: faulty)
    result = Generate().run(context)
    path = context.root / MODEL
    assert path.read_text() == hinted(generated.text, context.spec)
    assert "mended by the repairer" in result.summary
    monkeypatch.undo()
    path.write_text(faulty)
    result = phase.TestPhase().run(context)
    assert path.read_text() == generated.text
    assert "mended by the repairer" in result.summary
    assert {row["status"] for row in context.read_json("tests.json")["tests"]} == {"passed"}
    assert [run.status for run in load_runs(context.work_dir)] == ["done", "done"]
