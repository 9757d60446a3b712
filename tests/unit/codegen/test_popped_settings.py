"""Lists of layers that a constructor's loop makes of copies of a dict in the config, out of which it
takes what is no argument.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import ATTENTION, GENERATE, run_apart, save_odd

_HEAD = "import copy\n\n"
_LOOP = """        modules = [Front(config)]
        blocks = config.architecture
        if not isinstance(blocks, list):
            blocks = [blocks for _ in range(config.num_hidden_layers)]
        if config.num_hidden_layers != len(blocks):
            config.num_hidden_layers = len(blocks)
        for number, block in enumerate(blocks):
            block = COPIED or {"kind": "parallel"}
            kind = block.pop("path", None) or block.pop("kind", None)
            block["index"] = number
            modules.append(Block(config, **block))
        modules.append(Norm(config.hidden_size, config.norm_eps))
        self.layers = nn.Sequential(*modules)
"""
_BLOCK = """        self.index = index
        inside = mixer.pop("inside", None)
        if inside == "double":
            mixer["factor"] = 2 * mixer["factor"]
        self.attn = Attention(config, **mixer)
"""
_FRONT = """class Front(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids):
        return self.embed(input_ids)


class OddModel"""
_ARCHITECTURE = {"kind": "parallel", "mixer": {"inside": "double", "factor": 1.5}}


def _saved(folder: Path, *, copied: str = "copy.deepcopy(block)") -> Path:
    """Return a model whose layers are in an `nn.Sequential`, with the embedding and the norm."""
    block = """
x = x + self.attn(self.norm1(x), None) * self.factor
return x + self.mlp(self.norm2(x))
"""
    begin, end = ATTENTION.split("inv = 1.0")[0], ATTENTION[ATTENTION.index("scores = q @") :]
    model = "return self.layers(input_ids)"
    save_odd(folder, head=_HEAD, attention=begin + end, block=block, model=model)
    code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
    text = code.read_text()
    made = text.index("        self.embed = nn.Embedding"), text.index("        self.post_init()")
    text = text[: made[0]] + _LOOP.replace("COPIED", copied) + text[made[1] :]
    old = "        self.index = index\n        self.attn = Attention(config)\n"
    for before, after in {
        old: f"{_BLOCK}        self.factor = self.attn.factor\n",
        "def __init__(self, config, index):": "def __init__(self, config, mixer, index):",
        "class OddModel": _FRONT,
        "self.theta = config.rope_theta": "self.factor = factor",
        "def forward(self, x, position_ids):\n        x = x +": "def forward(self, x):\n        x = x +",
    }.items():
        assert before in text, before
        text = text.replace(before, after, 1)
    begin = text.index("class Attention")
    taken = text[begin:].replace(
        "def __init__(self, config):", "def __init__(self, config, factor):", 1
    )
    code.write_text(text[:begin] + taken)
    fields = config.read_text().replace(
        "norm_eps=1e-5,", f"norm_eps=1e-5, architecture={_ARCHITECTURE},"
    )
    kept = "        self.vocab_size"
    config.write_text(fields.replace(kept, f"        self.architecture = architecture\n{kept}"))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what comes of the model, and of one whose layers change the config's own dict."""
    folder = tmp_path_factory.mktemp("popped")
    models = [_saved(folder / "odd_popped"), _saved(folder / "odd_shared", copied="dict(block)")]
    return run_apart(GENERATE, models)


def test_layers_of_copied_dicts_are_one_list(made: dict[str, Any]) -> None:
    found = made["odd_popped"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert not found["recorded"]
    assert "for _ in range(config.num_hidden_layers)" in found["text"]
    assert "copy." not in found["text"]


def test_the_keys_that_are_known_are_asserted(made: dict[str, Any]) -> None:
    assert 'sorted(mixer) == ["factor", "inside"]' in made["odd_popped"]["text"]


def test_layers_that_change_a_dict_that_they_share_are_refused(made: dict[str, Any]) -> None:
    assert "error" in made["odd_shared"], made["odd_shared"]["text"]
