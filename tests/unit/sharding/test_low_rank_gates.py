"""Heads that ranks share, times a gate of two linear layers, whose result is a sum over ranks."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from onboard.testing.divided import divide
from onboard.verify.error import rmse_ratio
from tests.support.sharding.zoo import ROOT, save_family

GATES = """self.low = nn.Linear(hidden_size, 6, bias=False)
        self.high = nn.Linear(6, attention_heads_dim, bias=False)
        self.o_proj = """
FORWARD = """gate = self.high(torch.sigmoid(self.low(hidden_states)))
        heads = attn_output.reshape(*input_shape, -1)
        return self.o_proj(heads * gate) + heads.mean(-1, keepdim=True)
"""


def test_a_sum_is_whole_before_ranks_take_their_shares_of_it(tmp_path: Path) -> None:
    """What a rank makes of its summand with its own heads is no summand of the same result."""
    text = (ROOT / "models" / "modeling_llama.py").read_text(encoding="utf-8")
    begin = text.index("output = rowwise(self.o_proj")
    end = text.index("class LlamaMLP")
    text = text[:begin] + FORWARD + "\n\n" + text[end:]
    text = text.replace("self.o_proj = ", GATES, 1)
    text = re.sub(r"(?:col|row)wise\(\s*(self\.\w+),\s*([^=]+?),\s*\w+=[^)]*\)", r"\1(\2)", text)
    text = re.sub(r"torch\.ops\.onboard\.all_reduce\((\w+), [^)]*\)", r"\1", text)
    assert "layer_type" not in text  # nothing says how ranks divide it
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "modeling_llama.py").write_text(text, encoding="utf-8")
    folder = save_family(tmp_path, "llama", 5)
    tensors = load_file(folder / "model.safetensors")
    for key, weight in list(tensors.items()):
        if key.endswith("o_proj.weight"):
            hidden, heads = weight.shape
            for name, shape in (("low", (6, hidden)), ("high", (heads, 6))):
                tensors[key.replace("o_proj", name)] = torch.randn(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompt = {"input_ids": torch.arange(9)[None], "position_ids": torch.arange(9)[None]}
    (whole,) = divide(folder, tmp_path, 1).logits(prompt)
    for logits in divide(folder, tmp_path, 2).logits(prompt):
        assert rmse_ratio(logits, whole) < 1e-5
