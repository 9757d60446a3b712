"""What helpers of constructors give: a class of modules, chosen by a table and by what the machine is
asked, whose modules lack what others have; an object of settings.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd

HEAD = """

class Sparse(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mixed = nn.Linear(config.hidden_size, config.hidden_size)
        self.ahead, self.kept = True, None

    def forward(self, x, position_ids):
        self.kept = x
        return self.mixed(x), None


def pick(config, index):
    # The kernels of one are for GPUs
    if getattr(config, "sparse_config", None) is not None and torch.cuda.is_available():
        return Sparse
    return CLASSES[config._attn_implementation]

"""
TABLE = """
CLASSES = {"eager": Attention, "sdpa": Attention, "flash_attention_2": Sparse}


class Mlp(nn.Module)"""
MADE = """
        kind = pick(config, index)
        self.attn = kind(config)
        self.is_sparse = kind == Sparse
"""
BLOCK = """
if self.is_sparse:
    y, extra = self.attn(self.norm1(x), position_ids)
else:
    y = self.attn(self.norm1(x), position_ids)
x = x + y
return x + self.mlp(self.norm2(x))
"""
LAYERS = """
x = self.embed(input_ids)
active = any(getattr(layer.attn, "ahead", False) for layer in self.layers)
for index, layer in enumerate(self.layers):
    x = layer(x, position_ids)
    if active and index + 1 < len(self.layers):
        following, own = self.layers[index + 1].attn, layer.attn
        if getattr(following, "ahead", False) and hasattr(own, "kept") and own.kept is not None:
            following.before = own.kept
return self.norm(x)
"""


def test_a_helper_chooses_a_class_that_lacks_what_another_has(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_picked", head=HEAD, block=BLOCK, model=LAYERS)
    file = folder / "modeling_odd.py"
    text = file.read_text().replace("\nclass Mlp(nn.Module)", TABLE)
    file.write_text(text.replace("\n        self.attn = Attention(config)\n", MADE))
    made = run_apart(GENERATE, [folder])["odd_picked"]
    assert made.get("error") is None
    assert made["worst"] < 1e-5
    assert made["recorded"] == []
    assert "torch_attention(" in made["text"]
    assert "Sparse" not in made["text"]


SETTINGS = """
from dataclasses import dataclass


@dataclass
class Settings:
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    rope_theta: float
    norm_eps: float
    factor: float = 0.5


def settings_of(config):
    return Settings(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads // 2,
        intermediate_size=config.intermediate_size,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
    )

"""
SCALED = """
x = x + self.attn(self.norm1(x), position_ids)
return x + self.mlp(self.norm2(x)) * self.config.factor
"""


def test_settings_that_a_helper_makes_are_read_from_the_config(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_settings", head=SETTINGS, block=SCALED)
    file = folder / "modeling_odd.py"
    text = file.read_text().replace("self.index = index", "self.index, self.config = index, config")
    file.write_text(text.replace("[Block(config, i)", "[Block(settings_of(config), i)"))
    made = run_apart(GENERATE, [folder])["odd_settings"]
    assert made.get("error") is None
    assert made["worst"] < 1e-5
    assert made["recorded"] == []
    assert "config.num_attention_heads // 2" in made["text"]
    assert "* 0.5" in made["text"]
