"""Docstrings say what a class computes, by what it calls and makes."""

from __future__ import annotations

import pytest

from onboard.codegen.described import Code, described

CALL = "return torch.ops.onboard."
SAME = "[batch, seq, hidden] to the same"
MIXTURE = Code(
    "self.gate = Router(config)\nself.experts = Experts(config)",
    "return self.experts(x, *self.gate(x))",
)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (
            Code(
                "",
                f"x = torch.ops.onboard.torch_causal_conv1d(x, w)\n{CALL}torch_gated_delta_rule(q, k, v, g, b)",
            ),
            f"Gated delta rule mixer, {SAME}.",
        ),
        (Code("", f"{CALL}torch_causal_conv1d(x, w)"), f"Short convolution mixer, {SAME}."),
        (
            Code(
                "self.heads = config.num_key_value_heads",
                f"q, k = torch.ops.onboard.torch_rope_with_explicit_cos_sin(q, k, cos, sin)\n"
                f"{CALL}torch_attention(q, k, v, sinks=self.sinks, sliding_window=4)",
            ),
            "Grouped-query attention with rotary embeddings, sinks and a sliding window.",
        ),
        (Code("", f"{CALL}torch_attention(q, k, v)"), f"Causal self-attention, {SAME}."),
        (Code("", f"{CALL}torch_mla(q, r, c, k, w)"), f"Multi-head latent attention, {SAME}."),
        (MIXTURE, f"Mixture of experts, {SAME}."),
        (
            Code("self.experts = Experts(config)\nself.shared_expert = Mlp(config)", ""),
            f"Mixture of experts and one that all tokens share, {SAME}.",
        ),
        (
            Code("", "return torch.topk(x, 2)"),
            "Router: the experts of each token, and their weights.",
        ),
        (
            Code(
                "self.a = nn.Linear(4, 8)\nself.b = nn.Linear(8, 4)",
                "return self.b(self.a(x).relu())",
                "mlp",
            ),
            f"Feed-forward network, {SAME}.",
        ),
        (
            Code(
                "self.a = nn.Linear(4, 8)\nself.b = nn.Linear(8, 4)",
                "return self.b(self.a(x).relu())",
                "gate",
            ),
            None,
        ),
        (Code("", "return x * 2"), None),
    ],
)
def test_a_class_is_described_by_its_code(code: Code, found: str | None) -> None:
    assert described(code, {"Moe": MIXTURE}, {"Experts"}) == found


def test_what_chooses_elsewhere_is_no_router() -> None:
    assert described(Code("", "return torch.topk(x, 2)"), {}, set()) is None
