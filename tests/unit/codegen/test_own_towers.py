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


def test_what_their_constructors_make_is_not_asked(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_tower", head=_TOWER)
    file = folder / "modeling_odd.py"
    text = file.read_text()
    assert text.count(_MADE) == 1
    file.write_text(text.replace(_MADE, f"        self.seen = Seen(SeenConfig())\n{_MADE}"))
    made = run_apart(GENERATE, [folder])["odd_tower"]
    assert_translated(made)
    assert "class Seen" not in made["text"]


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
