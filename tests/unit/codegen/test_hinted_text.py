"""What model files say of several ranks is the whole division: two ranks that do what the file says,
and nothing else, compute what one computes.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn
from transformers import LlamaConfig

from onboard.analysis.spec import ModelSpec
from onboard.analysis.tiny.loaded_config import load_config
from onboard.analysis.tiny.tiny_config import tiny_config
from onboard.analysis.tiny.tiny_model import build_small
from onboard.analysis.tiny.tiny_prompts import prompt, vocabulary
from onboard.codegen.hints import hinted_text
from onboard.codegen.hints.hinted_text import hinted, with_hints
from onboard.codegen.hints.linear_hints import LinearHint, LinearHints
from onboard.codegen.hints.same_text import same_but_hints
from onboard.codegen.hints.small_division import graph_of, small_model
from onboard.codegen.hints.unhinted_text import without_hints
from onboard.errors import OnboardError
from onboard.graph.sharding.file_hints import FileHint, hints_of_file
from onboard.parallel.in_one_process import on_all_ranks
from onboard.parallel.ranks import Ranks
from onboard.verify.error import rmse_ratio
from tests.support.drawing import some_of

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = sorted(path.stem.removeprefix("modeling_") for path in (ROOT / "models").glob("*.py"))
DENSE = ["cohere", "gemma2", "glm", "gpt_neox", "granite", "llama", "phi", "qwen3"]
"""Whose layers are linear layers and attention alone, all sizes of which their files name."""
RANKS, LIMIT = 2, 1e-5
SUM = "torch.ops.onboard.all_reduce("
WORDS = ("colwise(", "rowwise(", "replicated(", "tp_mode", "enable_sharding", "all_reduce(")


def text_of(family: str) -> str:
    return (ROOT / "models" / f"modeling_{family}.py").read_text(encoding="utf-8")


def reference_of(family: str) -> nn.Module:
    zoo = yaml.safe_load((ROOT / "registry" / "zoo.yaml").read_text(encoding="utf-8"))["families"]
    fields = {key: value for key, value in next(iter(zoo[family].values())).items()}
    fields.pop("quantization_config", None)
    return build_small(tiny_config(load_config({"model_type": family, **fields})))


def share(model: nn.Module, said: dict[str, FileHint], rank: int) -> nn.Module:
    """Return a rank's model: its linear layers have what the file says of them."""
    own = copy.deepcopy(model)
    for name, hint in said.items():
        layer = own.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, nn.Linear)
        weight, bias = layer.weight, layer.bias
        if hint.tp_mode == "colwise":
            cut = hint.cut(weight.shape[0], RANKS)
            assert cut is not None
            layer.weight = nn.Parameter(weight[cut.entries[rank]], requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias[cut.entries[rank]], requires_grad=False)
        elif hint.tp_mode == "rowwise":
            inputs = torch.arange(weight.shape[1]).chunk(RANKS)[rank]
            layer.weight = nn.Parameter(weight[:, inputs], requires_grad=False)
            if bias is not None and rank:
                layer.bias = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
    return own


def _filled(text: str, reference: nn.Module) -> nn.Module:
    """Return the model of a file with the reference's weights, and random ones where it has others:
    what a file makes is not all initialised.
    """
    model, weights = small_model(text, reference), reference.state_dict()
    torch.manual_seed(0)
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[name] if name in weights else torch.randn_like(tensor) * 0.1)
    return model


def error_when_followed(text: str, reference: nn.Module) -> float:
    """Return how far two ranks that follow a file to the letter are from one rank."""
    model = _filled(text.replace(SUM, "torch.ops.onboard.dist_all_reduce("), reference)
    said = dict(hints_of_file(graph_of(small_model(text, reference), reference)))
    inputs = prompt(2, length=11, batch=3, tokens=vocabulary(reference))

    def logits(ranks: Ranks) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = share(model, said, ranks.rank)(**inputs).logits
        return found

    with torch.no_grad():
        expected = model(**inputs).logits
    return max(rmse_ratio(own, expected) for own in on_all_ranks(RANKS, logits))


def test_a_model_that_is_not_divided_computes_the_whole_on_every_rank() -> None:
    """What a file says of ranks means nothing until its graph is divided."""
    reference = reference_of("mixtral")
    model = _filled(text_of("mixtral"), reference)
    inputs = prompt(2, length=11, batch=3, tokens=vocabulary(reference))
    with torch.no_grad():
        expected = model(**inputs).logits
    for found in on_all_ranks(RANKS, lambda _: model.requires_grad_(False)(**inputs).logits):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", some_of(DENSE, always=("cohere",), by_chance=1))
def test_a_dense_file_says_all_of_the_division(family: str) -> None:
    assert error_when_followed(text_of(family), reference_of(family)) < LIMIT


def _without_last_sum(text: str) -> str:
    head, _, rest = text.rpartition(SUM)
    return f"{head}(lambda x, layer_type: x)({rest}"


@pytest.mark.parametrize(
    "broken",
    [
        _without_last_sum,
        lambda text: text.replace("= rowwise(self.down", "= replicated(self.down"),
        lambda text: text.replace("= colwise(self.gate", "= replicated(self.gate"),
    ],
    ids=["no sum", "no closing", "no opening"],
)
def test_a_file_that_says_another_division_computes_another_thing(
    broken: Callable[[str], str],
) -> None:
    """The letter of the file is what the test above reads: changed, it is wrong or cannot run."""
    compact = ast.unparse(ast.parse(text_of("llama"))).replace("'", '"')
    wrong = broken(compact.replace(", colwise,", ", colwise, replicated,"))
    assert wrong != compact
    try:
        error = error_when_followed(wrong, reference_of("llama"))
    except RuntimeError:
        return  # shapes of the shares do not fit
    assert error > 1e-3


@pytest.mark.parametrize("family", some_of(FAMILIES, always=(), by_chance=1))
def test_the_zoo_has_the_hints_that_its_files_without_them_are_given(family: str) -> None:
    text = text_of(family)
    again = with_hints(without_hints(text), reference_of(family))
    assert same_but_hints(again, text)
    for word in (*WORDS, "tp_min_local_shape", "output_sizes"):
        assert again.count(word) == text.count(word), word


@pytest.mark.parametrize("family", FAMILIES)
def test_hints_come_off_and_leave_nothing(family: str) -> None:
    text = text_of(family)
    plain = without_hints(text)
    ast.parse(plain)
    assert same_but_hints(plain, text)
    for word in (*WORDS, "tp_scaled_dim", "onboard.view("):
        assert word not in plain
    assert SUM in text


def test_another_computation_is_not_the_same_but_for_hints() -> None:
    text = text_of("llama")
    assert not same_but_hints(text, text.replace("rowwise(self.o_proj", "rowwise(self.q_proj"))
    assert not same_but_hints(text, text.replace("residual + hidden", "residual - hidden"))
    assert not same_but_hints(text, "no Python")


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("x.view(a, self.heads, b)", "x.view(a, -1, b)", True),
        ("x.view(a, self.heads, b)", "x.view(a, -1, c)", False),
        ("x.view(a, self.heads, -1)", "x.view(a, -1, b)", False),
        ("x.view(a, self.heads, b)", "x.view(a, self.groups, b)", False),
        ("x.sum(-1)", "x.sum(1)", False),
        ('"""A."""\n', '"""A.\n\nNothing is said of several ranks: 1 heads\n"""\n', False),
        ('"""A.\n"""\n', '"""A.\n\nNothing is said of several ranks: 1 heads\n"""\n', True),
    ],
)
def test_sizes_left_to_others_and_reasons_are_hints(first: str, second: str, same: bool) -> None:
    assert same_but_hints(first, second) is same
    assert same_but_hints(second, first) is same


def test_hints_that_divide_otherwise_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of a text finds hints that are not those of the division."""
    own = LinearHints.of

    def wrong(*args: object) -> LinearHint | None:
        found = own(*args)  # type: ignore[arg-type]
        if found is not None and found.values.tp_mode == "colwise":
            return LinearHint(FileHint("none", found.values.layer_type))
        return found

    monkeypatch.setattr(LinearHints, "of", wrong)
    with pytest.raises(AssertionError, match="hints divide .* otherwise among 2 ranks"):
        with_hints(without_hints(text_of("llama")), reference_of("llama"))


def test_a_file_without_hints_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> str:
        raise RuntimeError('no "graph"\n"""')

    monkeypatch.setattr(hinted_text, "with_hints", stopped)
    text = without_hints(text_of("llama"))
    monkeypatch.setattr(hinted_text, "_reference", lambda spec: nn.Module())
    found = hinted(text, ModelSpec.model_construct(repository=None, config={}))
    assert "Nothing is said of several ranks: RuntimeError: no _graph_" in str(
        ast.get_docstring(ast.parse(found))
    )


def test_heads_that_no_ranks_divide_are_named() -> None:
    config = LlamaConfig(
        num_attention_heads=1,
        num_key_value_heads=1,
        hidden_size=8,
        head_dim=8,
        intermediate_size=12,
        num_hidden_layers=1,
        vocab_size=16,
    )
    text = without_hints(text_of("llama"))
    with pytest.raises(OnboardError, match="no number of ranks from 2 to 8 divides 1 heads"):
        with_hints(text, build_small(config))
