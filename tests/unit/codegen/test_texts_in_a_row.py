"""Attention of flash_attn to texts that lie one after the other, beside which texts of one token have a
path of their own; and switches that the whole model's constructor sets in its layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.odd_code import GENERATE, run_apart, save_odd, with_rotary
from tests.unit.codegen.test_wrapped_models import ATTENTION, TABLES

_HEAD = """
from einops import rearrange
from flash_attn import flash_attn_varlen_func

"""
_ROWS = """
if q.shape[-2] == 1 or q.shape[-2] != k.shape[-2]:
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.size)
    y = F.softmax(scores, dim=-1) @ v
    return self.out(y.transpose(1, 2).reshape(b, t, -1))
queries, texts = q.shape[2], q.shape[0]
keys = k.shape[2]
q, k, v = [rearrange(x, "b h s d -> (b s) h d") for x in [q, k, v]]
ends = torch.arange(0, (texts + 1) * queries, step=queries, dtype=torch.int32, device=q.device)
causal = queries == keys
more = torch.arange(0, (texts + 1) * keys, step=keys, dtype=torch.int32) if not causal else ends
y = flash_attn_varlen_func(q, k, v, ends, more, queries, keys, causal=causal)
y = rearrange(y, "(b s) ... -> b s ...", b=texts)
return self.out(rearrange(y, "b s h d -> b s (h d)"))
"""
_MADE = "        self.lm_head = nn.Linear"
_SET = """        for layer in self.model.layers:
            layer.attn.in_rows = config.in_rows
"""


def _saved(folder: Path) -> Path:
    """Return a model with a switch of the config's between the two forms of attention."""
    begin, end = ATTENTION.split("scores = ", 1)
    rows = "\n".join(f"    {line}" for line in _ROWS.strip().splitlines())
    attention = f"{begin}if self.in_rows:\n{rows}\nscores = {end}"
    tables = TABLES.replace("AXES", "").replace("CUT", ":length").replace("BARE", "")
    save_odd(folder, head=_HEAD + tables, attention=attention)
    code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
    made = "self.tables = Tables(self.size, config.max_position_embeddings, config.rope_theta)\n"
    switched = f"{made}        self.in_rows = False\n"
    text = code.read_text().replace("self.theta = config.rope_theta\n", switched)
    code.write_text(text.replace(_MADE, f"{_SET}{_MADE}"))
    text = config.read_text().replace("norm_eps=1e-5,", "norm_eps=1e-5, in_rows=True,")
    kept = "self.norm_eps = norm_eps\n"
    config.write_text(text.replace(kept, f"{kept}        self.in_rows = in_rows\n"))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what comes of the model."""
    folder = _saved(tmp_path_factory.mktemp("rows") / "odd_rows")
    return run_apart(GENERATE, [folder])["odd_rows"]


def test_texts_of_one_length_in_a_row_are_attended_apart(made: dict[str, Any]) -> None:
    assert made.get("error") is None, made["error"]
    assert made["worst"] < 1e-5
    assert not made["recorded"]
    assert "torch_attention(" in made["text"]
    assert "softmax" not in made["text"]


def test_a_switch_that_all_layers_are_given_is_asserted(made: dict[str, Any]) -> None:
    assert "covered only with in_rows" in made["text"]


_MODULE = """

class Rows(nn.Module):
    def forward(self, q, k, v):
        assert all((i.dtype in [torch.float16, torch.bfloat16] for i in (q, k, v)))
        texts, queries = q.shape[0], q.shape[1]
        keys = k.shape[1]
        q, k, v = [rearrange(x, "b s ... -> (b s) ...") for x in (q, k, v)]
        ends = torch.arange(0, (texts + 1) * queries, step=queries, dtype=torch.int32, device=q.device)
        causal = ASKED
        more = torch.arange(0, (texts + 1) * keys, step=keys, dtype=torch.int32, device=q.device)
        y = flash_attn_varlen_func(q, k, v, ends, more, queries, keys, causal=causal)
        return rearrange(y, "(b s) ... -> b s ...", b=texts)
"""
_IN_MODULE = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size) for y in self.qkv(x).chunk(3, dim=-1))
return self.out(self.rotary(q, k, v).reshape(b, t, -1))
"""


def test_a_module_of_texts_in_a_row_is_causal_where_it_has_as_many_keys(tmp_path: Path) -> None:
    asked = {"odd_as_many": "queries == keys", "odd_more": "queries > keys"}
    folders = []
    for key, test in asked.items():
        head = _HEAD + _MODULE.replace("ASKED", test)
        folder = save_odd(tmp_path / key, head=head, attention=_IN_MODULE)
        folders.append(with_rotary(folder, "Rows()"))
    found = run_apart(GENERATE, folders)
    made = found["odd_as_many"]
    assert made.get("error") is None, made["error"]
    assert made["worst"] < 1e-5
    assert not made["recorded"]
    assert "torch_attention(" in made["text"]
    assert "not causal" in found["odd_more"]["error"]


_UNPADDED = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size) for y in self.qkv(x).chunk(3, dim=-1))
q, k, v, places, ends, longest = _upad_input(q, k, v, MASK, t, unpad_input)
y = flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=longest[0], max_seqlen_k=longest[1],
    causal=True, window_size=(self.window, 0),
)
return self.out(pad_input(y, places, b, t).reshape(b, t, -1))
"""
_PADDING = """
from flash_attn import flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
from transformers.modeling_flash_attention_utils import _upad_input

"""


def test_texts_without_padding_under_a_mask_of_ones_are_attended_apart(tmp_path: Path) -> None:
    masks = {
        "odd_ones": "torch.ones(k.shape[:2]).to(k)",
        "odd_half": "(torch.arange(t, device=x.device) != 3).long().expand(b, t)",
    }
    folders = []
    for key, mask in masks.items():
        folder = save_odd(tmp_path / key, head=_PADDING, attention=_UNPADDED.replace("MASK", mask))
        code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
        kept = "self.theta = config.rope_theta\n"
        held = f"{kept}        self.window = config.window\n"
        code.write_text(code.read_text().replace(kept, held, 1))
        text = config.read_text().replace("norm_eps=1e-5,", "norm_eps=1e-5, window=9,")
        kept = "self.norm_eps = norm_eps\n"
        config.write_text(text.replace(kept, f"{kept}        self.window = window\n"))
        folders.append(folder)
    found = run_apart(GENERATE, folders)
    made = found["odd_ones"]
    assert made.get("error") is None, made["error"]
    assert made["worst"] < 1e-5
    assert not made["recorded"]
    assert "self.window + 1" in made["text"]
    assert "error" in found["odd_half"]  # a token that is hidden is not attended to
