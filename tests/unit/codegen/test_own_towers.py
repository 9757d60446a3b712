"""Parts of code that texts do not run, made of configs of their own: encoders of images, say."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, assert_translated, run_apart, save_odd

_TOWER = """
from transformers import PretrainedConfig


class SeenConfig(PretrainedConfig):
    def __init__(self, width=6, **kwargs):
        super().__init__(**kwargs)
        self.width = width


class Seen(PreTrainedModel):
    config_class = SeenConfig

    def __init__(self, config):
        super().__init__(config)
        self.steps = nn.ModuleList()
        for _ in range(2):
            step = nn.Module()
            step.inner = nn.Linear(config.width, config.width)
            self.steps.append(step)
        self.post_init()

    def forward(self, pixels):
        for step in self.steps:
            pixels = step.inner(pixels)
        return pixels
"""
_MADE = "        self.embed = nn.Embedding"


_RUN = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from onboard import LLM, SamplingParams
folder = Path(sys.argv[1])
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
torch.manual_seed(seed := int(torch.seed() % 2**31))
model = AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval()
tensors = {key: (3 * tensor).contiguous() for key, tensor in model.state_dict().items()}
model.load_state_dict(tensors)
save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
prompt = torch.randint(0, config.vocab_size, (1, 9))
llm = LLM(folder, root=folder, device="cpu", dtype="float32")
(output,) = llm.generate([prompt[0].tolist()], SamplingParams(max_tokens=6, temperature=0.0))
made = output.outputs[0].token_ids
text = torch.cat((prompt, torch.tensor([made])), 1)
with torch.no_grad():
    expected = model(text).logits[0, 8:-1].argmax(-1).tolist()
print("FOUND" + json.dumps({"seed": seed, "made": made, "expected": expected, "facts": llm.facts}))
"""


def _with_a_tower(folder: Path) -> Path:
    save_odd(folder, head=_TOWER)
    file = folder / "modeling_odd.py"
    text = file.read_text()
    assert text.count(_MADE) == 1
    file.write_text(text.replace(_MADE, f"        self.seen = Seen(SeenConfig())\n{_MADE}"))
    return folder


def test_what_their_constructors_make_is_not_asked(tmp_path: Path) -> None:
    made = run_apart(GENERATE, [_with_a_tower(tmp_path / "odd_tower")])["odd_tower"]
    assert_translated(made)
    assert "class Seen" not in made["text"]


def test_a_checkpoint_with_one_runs_for_text(tmp_path: Path) -> None:
    folder = _with_a_tower(tmp_path / "odd_tower")
    made = run_apart(GENERATE, [folder])["odd_tower"]
    (folder / "models").mkdir()
    (folder / "models" / "modeling_odd_tower.py").write_text(made["text"])
    found = run_apart(_RUN, [folder])
    assert found["made"] == found["expected"], found
    assert any("prompts are text alone" in fact for fact in found["facts"]), found


def test_a_token_of_the_code_needs_the_whole_vocabulary(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_padding")
    file = folder / "modeling_odd.py"
    sizes = "nn.Embedding(config.vocab_size, config.hidden_size"
    text = file.read_text()
    assert sizes in text
    file.write_text(text.replace(sizes, f"{sizes}, 207"))
    made = run_apart(GENERATE, [folder])["odd_padding"]
    assert_translated(made)
    assert "207" in made["text"]
