"""A block that has no translation, written anew by an agent: the generator goes on with it, and the
proof is against the code as it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from onboard.agents.role_runs import load_runs
from onboard.agents.role_settings import AgentsSettings
from onboard.errors import OnboardError, UntranslatableError
from onboard.workflow.files import FileWriter
from onboard.workflow.phase import RunContext, RunOptions
from onboard.workflow.phases.generate import Generate
from onboard.workflow.remote import client
from onboard.workflow.worklog import Worklog
from tests.support.assignments import scripted
from tests.support.phases import FolderSource
from tests.support.remote_models import CODE

FILE = "modeling_aurora.py"


@dataclass(frozen=True)
class Stop:
    """A loop as long as values say, which has neither translation nor record, and computes what the code
    did.
    """

    block: str
    code: str
    instead: str


STOPS = {
    "in the mlp": Stop(
        "AuroraMLP",
        "        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n",
        """        gate = made = self.gate_proj(x)
        while torch.equal(made, gate):
            made = self.act_fn(gate)
        return self.down_proj(made * self.up_proj(x))
""",
    ),
    "in attention": Stop(
        "AuroraAttention",
        "        output = output.reshape(*input_shape, -1).contiguous()\n",
        """        joined = output
        while torch.equal(joined, output):
            joined = output.reshape(*input_shape, -1).contiguous()
        output = joined
""",
    ),
    "in a layer": Stop(
        "AuroraDecoderLayer",
        "        hidden_states = hidden_states + attended * self.residual_scale\n",
        """        before = hidden_states
        while torch.equal(hidden_states, before) and attended.any():
            hidden_states = hidden_states + attended * self.residual_scale
""",
    ),
}


def context_of(folder: Path, stop: Stop, answer: str) -> RunContext:
    """The run of a model that brings its own code, up to its spec."""
    code = shutil.copytree(
        CODE / "modern", folder / "model", ignore=shutil.ignore_patterns("__pycache__")
    )
    text = (code / FILE).read_text()
    assert text.count(stop.code) == 1
    (code / FILE).write_text(text.replace(stop.code, stop.instead))
    work_dir = folder / "root" / ".onboard" / "aurora"
    work_dir.mkdir(parents=True)
    context = RunContext(
        "acme/aurora",
        folder / "root",
        work_dir,
        RunOptions(
            device="cpu",
            trust_remote_code=True,
            agents=AgentsSettings(porter=scripted(f"print({answer!r})")),
        ),
        FileWriter(root=folder / "root"),
        Worklog(work_dir / "worklog.md"),
        FolderSource(code, json.loads((code / "config.json").read_text())),  # type: ignore[arg-type]
    )
    spec = client.call(context, "analyze", model="acme/aurora", revision=None)
    context.artifact("spec.yaml").write_text(spec)
    return context


def block_of(stop: Stop) -> str:
    text = (CODE / "modern" / FILE).read_text()
    start = text.index(f"class {stop.block}(")
    return text[start : text.index("\n\n\n", start)] + "\n"


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    client.close_sessions()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STOPS)
def test_a_block_without_translation_is_ported_and_proven(tmp_path: Path, name: str) -> None:
    stop = STOPS[name]
    answer = json.dumps({"block": {"name": stop.block, "text": block_of(stop)}})
    context = context_of(tmp_path, stop, answer)
    result = Generate().run(context)
    assert result.summary.endswith(f"{stop.block} is the porter's")
    assert f"class {stop.block}(" in (context.root / "models/modeling_aurora.py").read_text()
    (run,) = load_runs(context.work_dir)
    assert run.status == "done"
    assert run.before.startswith("cannot translate AuroraForCausalLM: ")
    assert run.after.startswith("every block, and the logits, are transformers'")
    prompt = json.loads((context.work_dir / run.transcript).read_text().splitlines()[0])["prompt"]
    assert stop.instead in prompt
    assert "torch.float32" in prompt


@pytest.mark.exhaustive
def test_a_port_that_computes_something_else_is_not_kept(tmp_path: Path) -> None:
    stop = STOPS["in the mlp"]
    wrong = block_of(stop).replace("* self.up_proj(x)", "+ self.up_proj(x)")
    answer = json.dumps({"block": {"name": stop.block, "text": wrong}})
    context = context_of(tmp_path, stop, answer)
    with pytest.raises(OnboardError, match=r"the proof fails with it: model\.layers\.0\.mlp"):
        Generate().run(context)
    context.options.agents = AgentsSettings()
    with pytest.raises(UntranslatableError, match="While at") as caught:
        Generate().run(context)
    assert caught.value.block == stop.block
    assert not (context.root / "models").exists()
