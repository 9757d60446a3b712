"""What generated tests stand on: a comparison that lets nothing through, honest weights, real
inputs of blocks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from onboard.analysis.counterparts import counterparts
from onboard.errors import OnboardError
from onboard.testing import (
    Call,
    assert_rmse_close,
    copy_weights,
    fresh_seed,
    generated_causal_lm,
    hf_causal_lm,
    random_prompt,
    randomize_,
    record_calls,
    rmse_ratio,
)
from onboard.testing.compare import NOTES
from onboard.testing.models import save_weights
from onboard.testing.recorded_calls import hand_own_modules
from onboard.testing.suite import EquivalenceSuite, Exact, Pair
from onboard.workflow.processes.pytest_run import run_pytest
from tests.support.warm import Warm

CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=50,
    head_dim=8,
    max_position_embeddings=64,
)


def test_what_a_constructor_makes_of_its_config_is_not_what_a_checkpoint_has(
    tmp_path: Path,
) -> None:
    class Changing(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            config.rms_norm_eps = 0.5

    class Suite(EquivalenceSuite):
        config = CONFIG

    model = hf_causal_lm(Changing, CONFIG, seed=0)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    Suite().save_config(model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["rms_norm_eps"], saved["architectures"]) == (CONFIG.rms_norm_eps, ["Changing"])


def test_rmse_ratio_is_relative_to_the_expected_value() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert rmse_ratio(expected * 1.01, expected) == pytest.approx(0.01, rel=1e-4)
    assert rmse_ratio(expected, expected) == 0


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (torch.tensor([1.0, float("nan")]), r"rmse ratio nan.*at \[1\] it gives nan, expected 2"),
        (torch.tensor([1.0, float("inf")]), r"rmse ratio (inf|nan).*at \[1\] it gives inf"),
        (
            torch.tensor([1.0, 2.1]),
            r"norm: rmse ratio 4.47e-02, at most 1e-02.*at \[1\] it gives 2\.0999999, expected 2$",
        ),
        (torch.tensor([[1.0, 2.0]]), r"norm: the shape is \[1, 2\], expected \[2\]"),
    ],
)
def test_a_difference_fails_with_both_values(actual: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_rmse_close(actual, torch.tensor([1.0, 2.0]), 1e-2, "norm")


def test_complex_numbers_differ_in_their_imaginary_part_too() -> None:
    expected = torch.complex(torch.ones(2), torch.tensor([1.0, 2.0]))
    assert rmse_ratio(expected, expected) == 0
    with pytest.raises(AssertionError, match=r"at \[1, 1\] it gives 3, expected 2"):
        assert_rmse_close(
            torch.complex(torch.ones(2), torch.tensor([1.0, 3.0])), expected, 1e-2, "x"
        )


def test_nothing_is_close_to_a_reference_of_zeros_or_nan() -> None:
    for expected in (torch.zeros(2), torch.tensor([float("nan"), 1.0])):
        with pytest.raises(AssertionError, match="rmse ratio nan"):
            assert_rmse_close(expected.clone(), expected, 1e-2, "x")


def test_an_error_beyond_the_limit_passes_where_the_reference_rounds_as_much() -> None:
    exact = torch.ones(100, dtype=torch.float64)
    theirs, asked = (exact + 2e-5).float(), []

    def compare(ours: torch.Tensor, tolerance: float = 1e-5) -> None:
        asked.clear()
        assert_rmse_close(
            ours.float(), theirs, tolerance, "logits", "", lambda: asked.append(1) or exact
        )

    compare(exact - 2.2e-5)  # 4.2e-5 from theirs
    assert asked == [1]
    compare(exact - 2.2e-5, 1e-4)
    assert asked == [], "float64 is asked beyond the limit alone"
    with pytest.raises(AssertionError, match=r"4.50e-05.* it errs by 2.50e-05, the .* 2.00e-05"):
        compare(exact - 2.5e-5)
    for wrong in (exact * 1.01, exact * float("nan")):
        with pytest.raises(AssertionError, match="rmse ratio"):
            compare(wrong)
    theirs = (exact + 1e-3).float()
    with pytest.raises(AssertionError, match="rmse ratio 7.99e-04"):
        compare(exact + 2e-4)  # much less than theirs, and too much to be rounding


def test_the_reference_of_a_pair_is_computed_in_float64() -> None:
    class Suite(EquivalenceSuite):
        model_file, reference = Path("modeling_llama.py"), LlamaForCausalLM

    expected = hf_causal_lm(LlamaForCausalLM, CONFIG, seed=0)
    pair = Pair(expected, nn.Identity(), [], {}, "cpu", "float32", Suite)
    text = torch.arange(7)[None]
    exact = pair.in_float64(input_ids=text, use_cache=False)()
    assert exact.dtype == torch.float64
    assert 0 < rmse_ratio(expected(text).logits, exact) < 1e-6
    last = pair.in_float64(input_ids=text, read=lambda logits: logits[0, -1])()
    assert torch.equal(last, exact[0, -1])
    assert expected.dtype == torch.float32

    def known(value: torch.Tensor) -> Exact:
        return pair.in_float64(input_ids=text, read=lambda _: value)

    with pytest.raises(AssertionError, match="at most 1e-05 is allowed; against float64"):
        pair.assert_close(1.00003 * exact.float(), exact.float(), "model", "x", known(exact))

    class Stricter(Suite):
        cpu_float32 = 1e-6

    for suite, dtype, device in (
        (Stricter, "float32", "cpu"),
        (Suite, "bfloat16", "cuda"),
    ):
        other = replace(pair, suite=suite, dtype=dtype, device=device)
        with pytest.raises(AssertionError, match="is allowed; at"):
            other.assert_close(1.2 * exact, exact, "model", "x", known(1.2 * exact))


def test_random_weights_leave_no_tensor_constant() -> None:
    model = LlamaForCausalLM(CONFIG)
    randomize_(model, seed=3)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert all(tensor.std() > 0.01 for tensor in first.values())
    assert all(abs(tensor.mean() - 1) < 0.3 for name, tensor in first.items() if "norm" in name)
    randomize_(model, seed=3)
    assert all(
        torch.equal(tensor, first[name])
        for name, tensor in model.state_dict().items()
        if "norm" not in name
    )
    randomize_(model, seed=4)
    assert not any(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())


def test_a_vector_that_a_constructor_leaves_unset_is_around_one() -> None:
    class Unset(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            for _ in range(8):  # memory that was another tensor's
                torch.full((1031,), -7.0)
                left = torch.empty(1031)
            self.left, self.set = nn.Parameter(left), nn.Parameter(torch.zeros(1031))

    model = hf_causal_lm(Unset, CONFIG, seed=2)
    assert abs(model.left.mean() - 1) < 0.05
    assert abs(model.set.mean()) < 0.05
    assert not torch.are_deterministic_algorithms_enabled()


def test_copied_weights_must_have_the_same_names() -> None:
    source, target = nn.Linear(2, 2), nn.Linear(2, 2)
    copy_weights(source, target)
    assert torch.equal(source.weight, target.weight)
    with pytest.raises(AssertionError, match=r"missing \['bias'\], unexpected \[\]"):
        copy_weights(source, nn.Linear(2, 2, bias=False))


class OwnConfig(LlamaConfig):
    model_type = "own_towers"


@pytest.mark.parametrize("config", [LlamaConfig, OwnConfig])
def test_towers_of_own_code_are_not_saved_and_those_of_transformers_are(
    config: type[LlamaConfig], tmp_path: Path
) -> None:
    model = LlamaForCausalLM(config(**CONFIG.to_diff_dict() | {"model_type": config.model_type}))
    save_weights(model, tmp_path, ["model.layers.1"])
    saved = {*load_file(tmp_path / "model.safetensors")}
    left_out = {key for key in model.state_dict() if key.startswith("model.layers.1.")}
    assert {*model.state_dict()} - saved == (left_out if config is OwnConfig else set())


def test_prompts_begin_beyond_zero_have_gaps_and_repeat_with_their_seed() -> None:
    prompt = random_prompt(vocab_size=50, batch=3, length=5, seed=1, start=64)
    positions = prompt["position_ids"]
    assert prompt["input_ids"].shape == positions.shape == (3, 5)
    assert len(set(positions[:, 0].tolist())) == 3
    assert positions.min() > 64
    assert set(positions.diff(dim=1).flatten().tolist()) <= {1, 2}
    assert positions.max() < 64 + 8 + 2 * 5
    again = random_prompt(vocab_size=50, batch=3, length=5, seed=1, start=64)
    assert all(torch.equal(prompt[name], again[name]) for name in prompt)


def test_a_text_of_distinct_tokens_may_have_all_of_them() -> None:
    for counted in (False, True):
        prompt = random_prompt(12, 3, 7, fresh_seed(), 5 * counted, counted=counted, distinct=True)
        assert prompt["input_ids"]._base is None, "torch.export makes a guard of it"
        rows = prompt["input_ids"].tolist()
        assert all(len(set(row)) == len(row) == 7 + 5 * counted for row in rows)
        assert all(0 <= token < 12 for row in rows for token in row)


def test_the_seed_comes_from_the_environment_or_is_new_and_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONBOARD_SEED", "17")
    assert fresh_seed() == 17
    assert "ONBOARD_SEED=17" in capsys.readouterr().out
    monkeypatch.delenv("ONBOARD_SEED")
    assert fresh_seed() != fresh_seed()


def test_a_recorded_call_replays_to_what_the_block_gave() -> None:
    model = hf_causal_lm(LlamaForCausalLM, CONFIG, seed=5)
    prompts = [random_prompt(50, batch=2, length=6, seed=seed) for seed in (1, 2)]
    calls = record_calls(model, ["model.layers.1.mlp", "model.layers.0.self_attn"], prompts)
    assert [len(found) for found in calls.values()] == [2, 2]
    attention = calls["model.layers.0.self_attn"][0]
    assert {"hidden_states", "position_ids", "cos", "sin"} <= attention.arguments.keys()
    for call in calls["model.layers.1.mlp"]:
        for actual, expected in call.replay(model.get_submodule("model.layers.1.mlp")):
            assert torch.equal(actual, expected)


class Turning(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.turn, self.block = nn.Identity(), Turned()
        self.turn.factor = factor

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.block(input_ids.float(), self.turn)


class Turned(nn.Module):
    def forward(self, x: torch.Tensor, turn: Any) -> torch.Tensor:
        return turn(x) * turn.factor


def test_a_module_that_a_block_is_given_is_the_own_one() -> None:
    theirs, ours = Turning(2.0), Turning(3.0)
    prompts = [random_prompt(50, batch=2, length=6, seed=1)]
    calls = hand_own_modules(record_calls(theirs, ["block"], prompts), theirs, ours)
    ((actual, expected),) = calls["block"][0].replay(ours.block)
    assert torch.equal(actual * 2, expected * 3)


class Renamed(nn.Module):
    def forward(self, states: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return states + sin.sum()


class Stranger(nn.Module):
    def forward(self, states: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        return states + frequencies


def test_replay_finds_arguments_by_name() -> None:
    model = hf_causal_lm(LlamaForCausalLM, CONFIG, seed=5)
    call = record_calls(model, ["model.layers.0.self_attn"], [random_prompt(50, 2, 6, seed=1)])[
        "model.layers.0.self_attn"
    ][0]
    ((actual, _),) = call.replay(Renamed())
    assert torch.equal(
        actual, call.arguments["hidden_states"] + call.arguments["position_embeddings"][1].sum()
    )
    with pytest.raises(AssertionError, match="Stranger wants 'frequencies'"):
        call.replay(Stranger())


class Complex(nn.Module):
    def forward(self, states: torch.Tensor, position_embeddings: torch.Tensor) -> torch.Tensor:
        return position_embeddings


@pytest.mark.parametrize("layout", ["halves", "side by side"])
def test_cos_and_sin_become_one_complex_tensor_where_a_block_wants_that(layout: str) -> None:
    angles = torch.rand(2, 6, 4)
    twice = (
        torch.cat((angles, angles), -1)
        if layout == "halves"
        else angles.repeat_interleave(2, dim=-1)
    )
    tables = (twice.cos(), twice.sin())
    call = Call({"states": torch.ones(1), "position_embeddings": tables}, outputs=list(tables))
    ((actual, expected),) = call.replay(Complex())
    assert_rmse_close(actual, torch.polar(torch.ones_like(angles), angles), 1e-6, "argument")
    assert torch.equal(actual, expected)


class Rotated(nn.Module):
    def forward(
        self, states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        cos, sin = position_embeddings
        heads = states.unflatten(-1, (2, 4)) * cos.unsqueeze(2) + sin.unsqueeze(2)
        return heads.flatten(2)


class LooksUp(nn.Module):
    def forward(
        self, states: torch.Tensor, cos: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        return states * cos[position_ids]


def test_rows_that_are_cut_for_all_texts_alike_are_given_for_each() -> None:
    states, tables = torch.randn(2, 3, 8), (torch.randn(3, 4), torch.randn(3, 4))
    heads = states.view(2, 3, 2, 4) * tables[0][None, :, None] + tables[1][None, :, None]
    call = Call({"states": states, "position_embeddings": tables}, outputs=[heads.flatten(2)])
    ((actual, expected),) = call.replay(Rotated())
    assert torch.equal(actual, expected)
    # What looks positions up itself has the table
    rows = {"cos": torch.randn(3, 8), "position_ids": torch.arange(3).expand(2, 3)}
    call = Call({"states": states, **rows}, outputs=[states * rows["cos"]])
    ((actual, expected),) = call.replay(LooksUp())
    assert torch.equal(actual, expected)


def test_vectors_that_nobody_initialised_get_values_about_one() -> None:
    for content in (float("nan"), float("inf"), 1e30, -1e30):
        norm = nn.LayerNorm(64)
        nn.init.constant_(norm.weight, content)
        randomize_(norm, seed=3)
        assert norm.weight.min() > 0
        assert norm.weight.max() < 2


class _Routed(nn.Module):
    """Each token goes to one of two experts, by the sign of its first number; `edge` says where one
    of 0 goes.
    """

    def __init__(self, edge: int = 0) -> None:
        super().__init__()
        self.experts, self.edge = nn.Parameter(torch.randn(2, 8, 8).bfloat16()), edge

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        margin = hidden_states[..., 0] - hidden_states[..., 1]
        second = margin >= 0 if self.edge else margin > 0
        both = torch.einsum("bsh,eho->ebso", hidden_states, self.experts)
        return torch.where(second[..., None], both[1], both[0])


@pytest.mark.parametrize(("ties", "left_out"), [(0, 0), (3, 3), (12, 0)])
def test_tokens_that_rounding_sends_elsewhere_are_left_out_of_half_precision(
    ties: int, left_out: int, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(fresh_seed())
    x = torch.randn(2, 10, 8).bfloat16()
    x[..., 0] = x[..., 1] + 3 * x[..., 1].sign()
    x[0, : min(ties, 10), 0] = x[0, : min(ties, 10), 1]
    x[1, : max(ties - 10, 0), 0] = x[1, : max(ties - 10, 0), 1]
    expected, actual = _Routed(), _Routed(edge=1)
    actual.experts = expected.experts

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = expected

        def forward(self, **_: object) -> torch.Tensor:
            return self.block(x)

    prompts = [random_prompt(50, 2, 10, fresh_seed())]
    (call,) = record_calls(Model(), ["block"], prompts)["block"]
    ((ours, theirs),) = call.replay(actual)
    assert ours[..., 0].numel() == 20 - left_out
    assert torch.equal(ours, theirs) is (ties == left_out), "where too many move, none is left out"
    assert (f"{left_out} of 20 tokens are left out" in capsys.readouterr().out) is (left_out > 0)
    actual.experts = nn.Parameter(expected.experts * 1.1)
    ((ours, theirs),) = call.replay(actual)
    assert rmse_ratio(ours, theirs) > 0.08, "an error of values is none of rounding"


def test_recording_a_block_that_never_runs_is_an_error() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, input_ids: torch.Tensor, **unused: object) -> torch.Tensor:
            return self.used(input_ids)

    with pytest.raises(AssertionError, match=r"never called \['idle'\]"):
        record_calls(
            Idle(), ["used", "idle"], [{"input_ids": torch.ones(2), "position_ids": torch.ones(2)}]
        )


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)
        self.places = Places()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, **unused: object
    ) -> torch.Tensor:
        return self.table(input_ids) + self.places(input_ids)


class Places(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(8, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(input_ids.shape[1]))


class Given(nn.Module):
    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(position_ids, self.places.weight)


def test_a_block_gets_the_positions_that_hugging_face_counts() -> None:
    model = Counting()
    (call,) = record_calls(model, ["places"], [random_prompt(4, 2, 6, seed=1, counted=True)])[
        "places"
    ]
    ((actual, expected),) = call.replay(Given(model.places))
    assert torch.equal(actual, expected)


def test_a_model_file_is_executed_again_after_another_took_its_place(
    tmp_path: Path, llama_files: dict[str, str]
) -> None:
    mine, other = tmp_path / "mine.py", tmp_path / "other.py"
    mine.write_text(llama_files["models/modeling_llama.py"])
    other.write_text(mine.read_text().replace("self.lm_head", "self.head"))
    names = [
        set(dict(generated_causal_lm(path, CONFIG).named_children()))
        for path in (mine, other, mine)
    ]
    assert names == [{"model", "lm_head"}, {"model", "head"}, {"model", "lm_head"}]


def test_bfloat16_leaves_the_rope_tables_in_float32(
    tmp_path: Path, llama_files: dict[str, str]
) -> None:
    path = tmp_path / "modeling_llama.py"
    path.write_text(llama_files["models/modeling_llama.py"])
    model = generated_causal_lm(path, CONFIG, dtype="bfloat16")
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in model.buffers()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


TESTS_OF_A_TEST = """
import pytest, torch
from onboard.testing import assert_rmse_close
from onboard.testing.compare import NOTES
from onboard.testing.recorded_calls import hand_own_modules

@pytest.mark.parametrize("path", ["a.mlp", "a.norm", "a.nan", "a.rounded"])
def test_block(path):
    assert_rmse_close(torch.ones(2), torch.ones(2), 1e-5, "first")
    actual = {"a.mlp": 1.5, "a.norm": 1.0, "a.nan": float("nan"), "a.rounded": 1 + 2e-5}[path]
    exact = torch.full((2,), 1 + 1e-5, dtype=torch.float64) if path == "a.rounded" else None
    assert_rmse_close(
        torch.full((2,), actual), torch.ones(2), 1e-5, path, "", exact is not None and (lambda: exact)
    )

def test_export(record_property):
    record_property("note", "two")
    record_property("note", "")
    NOTES.append("again")

@pytest.mark.skip(reason="no device")
def test_layer():
    pass

def test_model(broken):
    pass
"""


def test_the_plugin_writes_what_each_test_measured(warm: Warm, tmp_path: Path) -> None:
    tests, results = tmp_path / "test_x.py", tmp_path / "results.json"
    tests.write_text(TESTS_OF_A_TEST)
    run_pytest(
        ["-q", "-p", "onboard.testing.plugin", "--onboard-results", str(results), str(tests)],
        tmp_path,
        {},
        warm.run_module,
    )
    rows = {row["name"]: row for row in json.loads(results.read_text())}
    mlp, norm, nan = (rows[f"test_block[{name}]"] for name in ("a.mlp", "a.norm", "a.nan"))
    assert (mlp["status"], mlp["level"], mlp["block"], mlp["error"]) == (
        "failed",
        "block",
        "a.mlp",
        0.5,
    )
    assert mlp["message"].startswith("AssertionError: a.mlp: rmse ratio 5.00e-01")
    assert (norm["status"], norm["error"], norm["tolerance"], norm["message"]) == (
        "passed",
        0.0,
        1e-5,
        "",
    )
    assert (nan["status"], nan["error"]) == ("failed", None)
    rounded = rows["test_block[a.rounded]"]
    assert (rounded["status"], rounded["error"]) == ("passed", pytest.approx(2e-5, rel=1e-2))
    assert rounded["rounding"] == pytest.approx({"ours": 1e-5, "theirs": 1e-5}, rel=1e-2)
    assert norm["rounding"] is None
    assert (rows["test_layer"]["status"], rows["test_layer"]["message"]) == ("skipped", "no device")
    assert rows["test_export"]["message"] == "two; again"
    assert rows["test_model"]["status"] == "failed"
    assert "fixture 'broken' not found" in rows["test_model"]["message"]
    assert all(row["seconds"] > 0 for row in rows.values())


class _Filling(nn.Module):
    """Adds what it is given to a list that it is given."""

    def forward(
        self, x: torch.Tensor, earlier: list[torch.Tensor], position_ids: object = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mixed = torch.stack([*earlier, x]).sum(dim=0).tanh()
        earlier.append(x)
        return mixed, earlier


class _Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Filling(), _Filling()])

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        x = input_ids.float()
        earlier: list[torch.Tensor] = []
        for block in self.blocks:
            x, earlier = block(x, earlier)
        return x


def test_a_list_that_blocks_fill_is_recorded_as_each_was_given_it() -> None:
    model, ids = _Handing(), torch.randint(1, 9, (2, 5))
    prompts = [{"input_ids": ids, "position_ids": torch.arange(5).expand(2, 5)}]
    calls = record_calls(model, ["blocks.0", "blocks.1"], prompts)
    for count, (call,) in enumerate(calls.values(), start=1):
        for _ in range(2):  # a replay leaves the call as it was
            pairs = call.replay(_Filling())
            assert len(pairs) == 1 + count
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_what_a_block_leaves_out_has_another_shape() -> None:
    hidden, weights, chosen = torch.zeros(2, 5, 8), torch.zeros(2, 4, 5, 5), torch.zeros(2, 5, 3)
    assert counterparts([hidden, chosen], [hidden, weights, chosen])[1] is chosen
    assert counterparts([hidden, chosen], [hidden, None, chosen])[1] is chosen
    # No match: the first one, for the comparison to fail
    assert counterparts([chosen], [weights, hidden])[0] is weights
    assert counterparts([hidden], [hidden, weights])[0] is hidden
    logits, scores = torch.rand(6, 4), torch.rand(6, 4)  # of a router that chooses all experts
    assert counterparts([scores.clone(), chosen], [logits, scores, chosen])[0] is scores
    assert counterparts([hidden, None], [hidden]) == [hidden, None]  # which a dict leaves out
    assert counterparts([hidden, hidden, None], [hidden, hidden])[2] is None


def test_results_of_kinds_that_differ_are_compared_in_whatever_order_they_come() -> None:
    logits, weights, chosen = (
        torch.zeros(6, 16),
        torch.zeros(6, 4),
        torch.zeros(6, 4, dtype=torch.long),
    )
    found = counterparts([logits, weights, chosen], [chosen, weights, logits])
    assert [id(item) for item in found] == [id(item) for item in (logits, weights, chosen)]
    first, second = torch.zeros(3), torch.ones(3)
    # Only their order tells them apart
    assert counterparts([first, second], [second, first])[0] is second


def test_a_field_that_transformers_does_not_heed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "modeling_later.py"
    code = "def later(config):\n    return config.vocab_size + config.of_a_later_version + config.of_no_checkpoint\n"
    path.write_text(
        f'"""Generated by onboard from transformers 99.0.0,\nmodeling_llama.py."""\n{code}'
    )
    config = LlamaConfig(**CONFIG.to_dict(), of_a_later_version=1)
    with pytest.raises(
        OnboardError,
        match=r"reads LlamaConfig\.of_a_later_version, of which transformers .* 99.0.0",
    ):
        generated_causal_lm(path, config)


def test_a_block_that_no_token_reaches_is_not_compared_and_says_so() -> None:
    NOTES.clear()
    assert_rmse_close(torch.zeros(0, 4), torch.zeros(0, 4), 1e-5, "experts.3")
    assert NOTES.pop() == "experts.3: no token reached it, so nothing was compared"
    with pytest.raises(AssertionError, match="the shape is"):
        assert_rmse_close(torch.zeros(2, 4), torch.zeros(0, 4), 1e-5, "experts.3")
