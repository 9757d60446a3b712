"""Helpers of repositories that have a name without a definition of their own."""

from __future__ import annotations

from pathlib import Path

from tests.support.odd_code import GENERATE, run_apart, save_odd, with_rotary

_HEAD = """
watched = lambda _: None
halved = lambda x, by=2.0: x / by
"""
_MLP = """
y = self.down(F.silu(self.gate(x)) * self.up(x))
watched(y)
return y + halved(x)
"""
ROTARY = """

class Rotary(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.rope_type = "default"
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.config = config
        self.rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = self.rope_init_fn(self.config, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.original_inv_freq = self.inv_freq

    def compute_default_rope_parameters(self, config=None, device=None, seq_len=None, layer_type=None):
        known = config or self.config
        known.standardize_rope_params()
        rope = known.rope_parameters[layer_type] if layer_type is not None else known.rope_parameters
        dim = known.hidden_size // known.num_attention_heads
        places = torch.arange(0, dim, 2, dtype=torch.int64).to(device=device, dtype=torch.float)
        return 1.0 / (rope["rope_theta"] ** (places / dim)), 1.0

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
        freqs = (inv.float() @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos() * self.attention_scaling, emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)

"""
ATTENTION = """
b, t, _ = x.shape
q, k, v = (y.view(b, t, self.heads, self.size).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
cos, sin = (y.unsqueeze(1) for y in self.rotary(x, position_ids))
def turn(y):
    first, second = y.chunk(2, -1)
    return y * cos + torch.cat((-second, first), -1) * sin
q, k = turn(q), turn(k)
y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""


def test_a_lambda_of_the_module_is_a_function(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_lambda", head=_HEAD, mlp=_MLP)
    found = run_apart(GENERATE, [folder])["odd_lambda"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "watched" not in found["text"]


def test_default_frequencies_that_take_a_kind_of_layer_which_none_has(tmp_path: Path) -> None:
    head = "from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS\n" + ROTARY
    folder = with_rotary(save_odd(tmp_path / "odd_rope", head=head, attention=ATTENTION))
    found = run_apart(GENERATE, [folder])["odd_rope"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5


def test_sizes_that_a_config_works_out_fit_the_small_ones(tmp_path: Path) -> None:
    mlp = """
b, t, _ = x.shape
y = F.silu(self.gate(x)).view(b, t, self.config.num_heads, self.config.head_dim)
return self.down(y.flatten(2) * self.up(x))
"""
    folder = save_odd(tmp_path / "odd_worked_out", mlp=mlp)
    code, config = folder / "modeling_odd.py", folder / "configuration_odd.py"
    gate = "        self.gate = nn.Linear("
    code.write_text(code.read_text().replace(gate, f"        self.config = config\n{gate}", 1))
    text = config.read_text().replace("intermediate_size=80, ", "expand=2, head_dim=24, ")
    worked_out = """self.intermediate_size = int(expand * hidden_size)
        self.head_dim = head_dim
        self.num_heads = self.intermediate_size // self.head_dim
        self.layer_types = ["full_attention"] * num_hidden_layers  # as long as there are layers"""
    config.write_text(text.replace("self.intermediate_size = intermediate_size", worked_out))
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"intermediate_size": 144, ', ""))
    found = run_apart(GENERATE, [folder])["odd_worked_out"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5


_FLAGGED = """
try:
    from flash_attn import flash_attn_func
    fast = True
except Exception:
    fast = False


class Rotary(nn.Module):
    def __init__(self, size, longest, theta):
        super().__init__()
        self.longest = longest
        inv = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
        angles = torch.einsum("i,j->ij", torch.arange(longest).float(), inv)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_cached", angles.cos()[None, None, :, :], persistent=False)
        self.register_buffer("sin_cached", angles.sin()[None, None, :, :], persistent=False)

    def forward(self, x, seq_len=None):
        return self.cos_cached[:, :, :seq_len, ...], self.sin_cached[:, :, :seq_len, ...]


def halves_turned(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def turn(q, k, cos, sin, position_ids, heads_last):
    heads = 2 if heads_last else 1
    cos = cos.squeeze(1).squeeze(0)[position_ids].unsqueeze(heads)
    sin = sin.squeeze(1).squeeze(0)[position_ids].unsqueeze(heads)
    return q * cos + halves_turned(q) * sin, k * cos + halves_turned(k) * sin

"""
_TURNED = """
b, t, _ = x.shape
q, k, v = self.qkv(x).chunk(3, dim=-1)
q = q.view(b, t, self.heads, self.size)
k = k.view(b, t, self.heads, self.size)
v = v.view(b, t, self.heads, self.size)
if not fast:
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
cos, sin = self.rotary(v, seq_len=t)
q, k = turn(q, k, cos, sin, position_ids, fast)
scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), diagonal=1)
scores = scores.masked_fill(mask, float("-inf"))
y = F.softmax(scores, dim=-1) @ v
return self.out(y.transpose(1, 2).reshape(b, t, -1))
"""


def test_a_rotation_that_is_told_how_heads_lie(tmp_path: Path) -> None:
    folder = save_odd(tmp_path / "odd_told", head=_FLAGGED, attention=_TURNED)
    with_rotary(folder, "Rotary(self.size, config.max_position_embeddings, config.rope_theta)")
    found = run_apart(GENERATE, [folder])["odd_told"]
    assert found.get("error") is None, found["error"]
    assert found["worst"] < 1e-5
    assert "torch_rope_with_explicit_cos_sin" in found["text"]
    assert not found["recorded"]
