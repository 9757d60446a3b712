"""Code of other years: what it finds in place of names and packages that are not here, and what its
classes are given.
"""

from __future__ import annotations

import importlib
import random
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from onboard.analysis import repository, repository_classes
from onboard.analysis.cut_tables import cut_tables, rows_for_each_text
from onboard.analysis.repository import make_package
from onboard.analysis.repository_classes import (
    bring_up_to_date,
)
from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.source import module_source
from onboard.analysis.tiny.random_weights import is_table
from onboard.analysis.tiny.tiny_prompts import begins_at_zero, counts_positions
from onboard.analysis.tiny.tiny_sizes import keep_heads
from onboard.codegen.translate.language.program.uses import inputs_of
from onboard.errors import ConsentRequiredError, OnboardError
from onboard.hf.given_inputs import (
    counts_itself,
    give_masks,
    give_positions,
    hands_no_mask,
    spare_masks,
    spare_positions,
)
from onboard.hf.old import interfaces, names, packages
from onboard.hf.old.einops_forms import rearrange, repeat
from onboard.hf.old.gone import Gone, importing
from onboard.hf.old.own_configs import is_own_of_transformers, own_config_class
from onboard.hub import with_own_type
from onboard.modeling import CausalLMOutput
from onboard.plain_config import OldFields, PlainConfig, add_old_defaults
from onboard.workflow.phases.gather import require_consent_for_code

AUTO_MAP = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M"}


_OLD = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OldConfig(PretrainedConfig):
    model_type = "old"
    def __init__(self, n_deep=2, **kwargs):
        self.n_deep = n_deep
        super().__init__(**kwargs)

class OldBase(PreTrainedModel):
    config_class = OldConfig
    def __init__(self, *inputs, **kwargs):
        super().__init__(*inputs, **kwargs)

class OldInner(OldBase):
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(config.n_deep))
        self.init_weights()
    def get_input_embeddings(self):
        return self.words

class OldLM(OldBase):
    def __init__(self, config):
        super().__init__(config)
        self.inner = OldInner(config)
        self.head = nn.Linear(4, 8, bias=False)
        self.init_weights()
    def get_input_embeddings(self):
        return self.inner.words
    def get_output_embeddings(self):
        return self.head
    def forward(self, input_ids, **kwargs):
        return self.head(self.inner.words(input_ids))
"""


@pytest.fixture(autouse=True)
def old_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give transformers' classes what models of old code need; a table of its own is left as it was
    to the tests that follow.
    """
    table = dict(interfaces.ROPE_INIT_FUNCTIONS)
    monkeypatch.setattr(interfaces, "ROPE_INIT_FUNCTIONS", table)
    with monkeypatch.context() as patch:
        for process_wide in ("_masks_by_old_names", "_plain_outputs", "_without_cuda"):
            patch.setattr(interfaces, process_wide, list)
        interfaces.restore_old_interfaces()


def test_outputs_that_are_no_dataclasses_are_dicts_of_what_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plain(ModelOutput):
        logits: Any = None
        more: Any = None

    with pytest.raises(TypeError, match="is not a dataclass"):
        Plain(logits=1)
    monkeypatch.setattr(ModelOutput, "__init__", ModelOutput.__init__)
    assert interfaces._plain_outputs()
    assert not interfaces._plain_outputs()  # once is enough
    made = Plain(logits=torch.ones(2), more=3)
    assert made["logits"] is made[0] is made.logits
    assert made.to_tuple()[1:] == (3,)
    assert CausalLMOutputWithPast(logits=torch.ones(2))[0].sum() == 2
    with pytest.raises(TypeError):
        CausalLMOutputWithPast(unknown=1)


def test_a_known_model_type_with_own_code_goes_by_a_type_of_its_own() -> None:
    own = with_own_type({"model_type": "llama", "auto_map": AUTO_MAP})
    assert own["model_type"] == "llama_own_code"
    assert with_own_type(own) == own
    for config in ({"model_type": "llama"}, {"model_type": "unheard", "auto_map": AUTO_MAP}):
        assert with_own_type(config) == config


def test_a_decoder_may_be_named_as_a_model_for_sequences_from_sequences() -> None:
    """As ChatGLM's first releases name theirs."""
    named = {"AutoConfig": "configuration_x.C", "AutoModelForSeq2SeqLM": "modeling_x.M"}
    own = with_own_type({"model_type": "llama", "auto_map": named})
    assert own == {"model_type": "llama_own_code", "auto_map": {**AUTO_MAP, **named}}
    encoder = {"model_type": "t5", "is_encoder_decoder": True, "auto_map": named}
    assert with_own_type(encoder) == encoder


def test_a_class_for_all_uses_that_writes_texts_is_the_language_model() -> None:
    """Where `auto_map` names no other; not one of a model with parts, which may be one that sees."""
    named = {"AutoConfig": "configuration_x.C", "AutoModel": "modeling_x.XForConditionalGeneration"}
    config = {"model_type": "unheard", "auto_map": named}
    causal = {"AutoModelForCausalLM": named["AutoModel"]}
    assert with_own_type(config)["auto_map"] == named | causal
    parts = config | {"vision_config": {"model_type": "some_tower"}}
    unnamed = config | {"vision_config": {"depth": 2}}
    body = config | {"auto_map": named | {"AutoModel": "modeling_x.XModel"}}
    for other in (parts, unnamed, body):
        assert with_own_type(other) == other


def test_own_code_of_a_known_type_needs_consent(tmp_path: Path) -> None:
    config = with_own_type({"model_type": "llama", "auto_map": AUTO_MAP})
    (tmp_path / "configuration_x.py").write_text("import os\n")
    (tmp_path / "modeling_x.py").write_text("import torch\n")
    with pytest.raises(ConsentRequiredError, match="would be run") as caught:
        require_consent_for_code(config, tmp_path, trusted=False)
    assert "transformers' own llama" in caught.value.hint
    assert require_consent_for_code(config, tmp_path, trusted=True)


def test_code_beside_a_config_class_of_transformers_is_taken(tmp_path: Path) -> None:
    config = {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling_x.M"}}
    assert require_consent_for_code(with_own_type(config), tmp_path, trusted=True)
    with pytest.raises(OnboardError, match="brings no code for it"):
        require_consent_for_code({**config, "model_type": "unheard"}, tmp_path, trusted=True)


def test_a_config_of_transformers_reads_as_one_of_its_year(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fields are compared with those that transformers 4.51 has for the same arguments."""
    monkeypatch.setitem(sys.modules, "repository_of_a_config", ModuleType("repository_of_a_config"))
    before = LlamaConfig.model_type, LlamaConfig.rope_scaling
    own: Any = own_config_class(LlamaConfig, "llama_own_code", "repository_of_a_config")
    assert is_own_of_transformers(own.__name__)
    assert sys.modules["repository_of_a_config"].LlamaOwnCodeConfig is own  # type: ignore[attr-defined]
    theta = random.uniform(1e4, 1e6)
    plain = own.from_dict({"rope_theta": theta, "torch_dtype": "bfloat16", "more": 3})
    assert (plain.rope_theta, plain.rope_scaling, plain.more) == (theta, None, 3)
    assert (plain.torch_dtype, plain.pruned_heads, plain.use_cache) == (torch.bfloat16, {}, True)
    assert own().rope_theta == 10000.0
    scaled = own.from_dict({"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert scaled.rope_scaling == {"type": "linear", "factor": 4.0}
    assert not hasattr(plain, "partial_rotary_factor")  # which that config never had
    other: Any = own_config_class(PhiConfig, "phi_own_code", "repository_of_a_config")
    assert other(partial_rotary_factor=0.25).partial_rotary_factor == 0.25
    assert (LlamaConfig.model_type, LlamaConfig.rope_scaling) == before
    assert not hasattr(LlamaConfig(), "rope_theta")


def test_a_config_of_transformers_keeps_what_its_heir_gives_a_field_of_another_type() -> None:
    class Heir(LlamaConfig):
        def __init__(self, intermediate_size: Any = None, **kwargs: Any) -> None:
            super().__init__(intermediate_size=intermediate_size, **kwargs)

    with pytest.raises(StrictDataclassError, match="intermediate_size"):
        Heir()
    add_old_defaults(Heir)
    assert Heir().intermediate_size is None
    assert Heir(intermediate_size=[8, 9], hidden_size=64.0).hidden_size == 64.0
    with pytest.raises(StrictDataclassError, match="intermediate_size"):
        LlamaConfig(intermediate_size=None)  # transformers' own stays as it is


def test_a_file_that_registers_its_classes_for_a_type_that_is_taken_can_be_imported() -> None:
    class Taken(PretrainedConfig):  # type: ignore[misc]
        model_type = "llama"

    class Model(PreTrainedModel):  # type: ignore[misc]
        config_class = Taken

    before = dict(CONFIG_MAPPING.items())
    with interfaces.without_registering():
        AutoConfig.register("llama", Taken)
        AutoModelForCausalLM.register(Taken, Model)
    assert dict(CONFIG_MAPPING.items()) == before
    with pytest.raises(ValueError, match="already used"):
        AutoConfig.register("llama", Taken)


def test_a_gone_name_is_imported_and_refuses_when_it_is_called() -> None:
    module = importlib.import_module("transformers.modeling_utils")
    facts = names.provide("transformers.modeling_utils", ["no_such_filtering"])
    found: Any = module.no_such_filtering
    assert "can be imported, and not called" in facts[0]
    assert not isinstance(3, found)
    with pytest.raises(OnboardError, match="no_such_filtering"):
        found["batch", "length"](3)  # as annotations name shapes
    with pytest.raises(TypeError):
        list(found)
    with importing():

        @found
        def decorated() -> None: ...

    with pytest.raises(OnboardError, match="no_such_filtering"):
        found(3)

    class Heir(found):  # type: ignore[misc]
        pass

    with pytest.raises(OnboardError, match="no_such_filtering"):
        Heir()
    del module.no_such_filtering  # type: ignore[attr-defined]


def test_a_decorator_that_writes_docstrings_takes_the_arguments_of_any_year(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "add_code_sample_docstrings"
    module: Any = importlib.import_module("transformers.utils")
    with pytest.raises(TypeError):
        getattr(module, name)(tokenizer_class="Toy")
    monkeypatch.setattr(module, name, getattr(module, name))
    [fact] = names.provide("transformers.utils", [name])
    assert "does something else now" in fact
    assert getattr(module, name)(tokenizer_class="Toy")(len) is len


@pytest.mark.parametrize("name", ["HybridCache", "SinkCache", "SlidingWindowCache"])
def test_a_cache_that_is_gone_can_be_asked_after_and_not_made(name: str) -> None:
    stand_in = names.STAND_INS[name]
    assert stand_in.__name__ == name
    assert not isinstance(DynamicCache(), stand_in)
    with pytest.raises(OnboardError, match=name):
        stand_in(config=None, max_batch_size=1)


@pytest.mark.parametrize(
    "name",
    ["find_pruneable_heads_and_indices", "prune_conv1d_layer", "get_device_map"],
)
def test_what_would_change_the_model_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("transformers.pytorch_utils")
    monkeypatch.setattr(module, name, None, raising=False)  # to be taken away at the end
    monkeypatch.delattr(module, name)
    names.provide("transformers.pytorch_utils", [name])
    with pytest.raises(OnboardError, match=name):
        getattr(module, name)({1}, 2)


def test_layers_know_their_kind_of_attention_as_they_did() -> None:
    config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    told = interfaces._MEMBERS[GradientCheckpointingLayer]
    layer_class: Any = type("Layer", (GradientCheckpointingLayer,), told)
    for index, kind in enumerate(config.layer_types):
        layer = layer_class()
        assert not hasattr(layer, "attention_type")
        layer.self_attn = torch.nn.Identity()
        layer.self_attn.config, layer.self_attn.layer_idx = config, index
        assert layer.attention_type == kind
        layer.attention_type = "its own"
        assert layer.attention_type == "its own"


def test_masked_and_pruned_heads_are_refused_and_none_are_not() -> None:
    members: Any = interfaces._MEMBERS[PreTrainedModel]
    assert members["get_head_mask"](None, None, 3) == [None] * 3
    assert members["prune_heads"](None, {}) is None
    for call in (
        lambda: members["get_head_mask"](None, torch.ones(2), 3),
        lambda: members["_convert_head_mask_to_5d"](None, torch.ones(2), 3),
        lambda: members["prune_heads"](None, {0: [1]}),
    ):
        with pytest.raises(OnboardError, match="which is not here"):
            call()


def test_a_config_with_pruned_heads_is_refused() -> None:
    config = {"model_type": "old", "pruned_heads": {"0": [1]}}
    with pytest.raises(OnboardError, match="pruned_heads"):
        bring_up_to_date("no_package", PretrainedConfig, PreTrainedModel, config)


def test_a_cache_without_a_limit_has_none_as_it_had() -> None:
    assert interfaces._MEMBERS[Cache]["get_max_cache_shape"](DynamicCache()) is None


@pytest.mark.parametrize("called", [True, False])
def test_a_decorator_that_reads_the_config_is_called_before_or_not(called: bool) -> None:
    names.provide("transformers.utils.generic", ["check_model_inputs"])
    decorate = importlib.import_module("transformers.utils.generic").check_model_inputs

    class Model:
        config = SimpleNamespace(use_cache=True, return_dict=True)

        def forward(self, x: int, use_cache: bool | None = None, **_: Any) -> tuple[int, Any]:
            return x, use_cache

    forward = (decorate() if called else decorate)(Model.forward)
    assert forward(Model(), 3) == (3, True)
    assert forward(Model(), 3, use_cache=False) == (3, False)


def test_an_argument_is_taken_by_its_old_name() -> None:
    @names.STAND_INS["deprecate_kwarg"]("num_old", version="4.50", new_name="num_new")
    def function(num_new: int = 0, **_: Any) -> int:
        return num_new

    assert (function(num_old=3), function(num_new=4), function(5)) == (3, 4, 5)


def test_a_missing_package_is_asked_for_by_the_name_that_it_is_called() -> None:
    asked = AssertionError("Please install FlashAttention first")
    assert packages.asked_for(asked, ["flash_attn", "torch"]) == packages.missing(["flash_attn"])
    assert packages.asked_for(AssertionError("no such kernels"), ["flash_attn"]) == []


def test_a_missing_package_is_stood_in_for_with_all_its_modules() -> None:
    assert packages.missing(["torch", "no_such_kernels"]) == ["no_such_kernels"]
    asked = AssertionError("Please install NoSuchKernels first, with pip install no-such-kernels")
    assert packages.asked_for(asked, ["no_such_kernels", "torch"]) == ["no_such_kernels"]
    packages.stand_in("no_such_kernels.ops")
    found = importlib.import_module("no_such_kernels.ops.deep").scan
    assert isinstance(found, Gone)
    with pytest.raises(OnboardError) as caught:
        found(1)
    otherwise = "or what the project of no_such_kernels says"
    assert caught.value.hint == f"pip install no-such-kernels, {otherwise}"
    with pytest.raises(AttributeError, match="__version__ of no_such_kernels, which is not inst"):
        _ = sys.modules["no_such_kernels"].__version__
    assert packages.asked_for(asked, ["no_such_kernels"]) == []
    for name in [name for name in sys.modules if name.split(".")[0] == "no_such_kernels"]:
        del sys.modules[name]


def test_a_folder_of_the_codes_project_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages._FINDER, "packages", {"einops"})
    assert packages.to_install("flash_attn") == "pip install flash-attn"
    monkeypatch.setattr(packages._FINDER, "packages", {"einops", "lib"})
    own = (
        "Put lib, of the code's own project, beside its files,"
        " which import it with a dot before its name then"
    )
    assert packages.to_install() == own
    assert packages.to_install("flash_attn") == f"{own}; pip install flash-attn"


def test_what_is_gone_can_be_added_to_while_a_file_is_imported() -> None:
    gone = Gone("no_such_clients.errors", "pip install no-such-clients")
    with importing():
        assert [gone + ("b",), ("b",) + gone] == [gone, gone]
    with pytest.raises(OnboardError, match=r"no_such_clients\.errors, which is not here"):
        gone + ("b",)


def test_a_star_gives_the_names_that_code_reads_of_modules_that_list_theirs_today() -> None:
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    listed = module.__all__
    text = """
from transformers.models.llama.modeling_llama import *
from transformers.models.llama.configuration_llama import *

@add_start_docstrings_to_model_forward(SOME_INPUTS_DOCSTRING)
class Own(LlamaPreTrainedModel):
    def forward(self, x: LlamaConfig, own=None):
        try:
            return [apply_rotary_pos_emb(y, own) for y in x]
        except ValueError as error:
            print(error)
"""
    try:
        with pytest.raises(NameError):
            exec(text, {})
        facts = names.provide_by_stars(text)
        taken: dict[str, Any] = {}
        exec(text, taken)
        assert taken["apply_rotary_pos_emb"] is module.apply_rotary_pos_emb
        assert taken["LlamaConfig"] is LlamaConfig
        assert isinstance(taken["SOME_INPUTS_DOCSTRING"], Gone)
        assert "y" not in taken
        assert any("apply_rotary_pos_emb" in fact for fact in facts)
        assert names.provide_by_stars(text.replace(" *\n", " Own\n")) == []
    finally:
        module.__all__ = listed


def test_a_package_that_is_missing_behind_an_error_is_found() -> None:
    def imported() -> None:
        try:
            importlib.import_module("no_such_norms.fast")
        except ImportError:
            raise ImportError("norms are required, and cannot be imported")  # noqa: B904

    with pytest.raises(ImportError) as caught:
        imported()
    assert repository.not_found(caught.value) == "no_such_norms"
    assert repository.not_found(ImportError("cannot import name x")) == ""


@pytest.mark.parametrize(
    ("pattern", "sizes", "same"),
    [
        ("b s (h d) -> b h s d", {"d": 3}, lambda x: x.unflatten(-1, (-1, 3)).transpose(1, 2)),
        ("b s (two d) -> two b s d", {"two": 2}, lambda x: x.unflatten(-1, (2, -1)).movedim(2, 0)),
        ("b s ... -> (b s) ...", {}, lambda x: x.flatten(0, 1)),
        ("b s d -> b s 1 d", {}, lambda x: x.unsqueeze(2)),
        ("... d -> ... (d n)", {"n": 2}, lambda x: x.repeat_interleave(2, -1)),
        ("b s d -> (n b) s d", {"n": 2}, lambda x: torch.cat([x, x])),
    ],
)
def test_patterns_of_axes_are_what_torch_does(pattern: str, sizes: Any, same: Any) -> None:
    tensor = torch.randn(2, 4, 6)
    function = repeat if "n" in sizes else rearrange
    assert torch.equal(function(tensor, pattern, **sizes), same(tensor))


def test_a_dimension_of_size_one_is_repeated_or_goes() -> None:
    tensor = torch.randn(2, 1, 4, 6)
    spread = repeat(tensor, "b 1 l d -> b h l d", h=3)
    assert torch.equal(spread, tensor.expand(2, 3, 4, 6))
    assert torch.equal(rearrange(tensor, "b 1 l d -> b l d"), tensor.squeeze(1))


class _Cut(nn.Module):
    """Looks positions up in a table of as many rows as the text has tokens."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.cut = cut
        self.config = PretrainedConfig()
        self.table = nn.Embedding(200, 8)
        self.tokens = nn.Embedding(200, 8)

    def forward(
        self, input_ids: Any, position_ids: Any, attention_mask: Any = None, use_cache: Any = None
    ) -> CausalLMOutput:
        rows = self.table.weight[: input_ids.shape[1]] if self.cut else self.table.weight
        return CausalLMOutput(self.tokens(input_ids) + rows[position_ids])


def test_positions_that_must_be_below_the_length_are_found_out() -> None:
    assert begins_at_zero(_Cut(cut=True))
    assert not begins_at_zero(_Cut(cut=False))
    assert not counts_positions(_Cut(cut=True))


def test_a_model_that_needs_a_mask_gets_ones() -> None:
    class Masked:
        def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
            return input_ids * attention_mask

    give_masks(Masked)
    ids = torch.tensor([[random.randrange(2, 99), 3]])
    assert torch.equal(Masked().forward(input_ids=ids), ids)
    assert not Masked().forward(ids, attention_mask=torch.zeros_like(ids)).any()


def test_a_model_that_needs_positions_gets_them() -> None:
    class Placed:
        def forward(self, input_ids: Any = None, position_ids: Any = None) -> Any:
            return input_ids * 0 + position_ids

    give_positions(Placed)
    ids = torch.tensor([[random.randrange(2, 99), 3, 4]])
    assert Placed().forward(input_ids=ids).tolist() == [[0, 1, 2]]
    assert Placed().forward(ids, position_ids=torch.full_like(ids, 7)).tolist() == [[7, 7, 7]]


class _Asking:
    def forward(self, input_ids: Any = None, position_ids: Any = None) -> Any:
        return input_ids if not position_ids else None


def test_a_model_that_fails_with_positions_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Asking, "forward", _Asking.forward)
    ids = torch.tensor([[random.randrange(2, 99), 3, 4]])
    assert not counts_itself(_Asking)
    with pytest.raises(RuntimeError, match="ambiguous"):
        _Asking().forward(ids, position_ids=torch.full_like(ids, 7))
    spare_positions(_Asking)
    assert torch.equal(_Asking().forward(ids, position_ids=torch.full_like(ids, 7)), ids)
    assert counts_itself(_Asking)
    assert inputs_of(_Asking) == ["input_ids"]


def test_a_text_of_one_token_gets_no_mask_where_code_fails_with_one() -> None:
    class Masked(nn.Module):
        def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
            mask = None if input_ids.shape[1] > 1 else attention_mask
            q = input_ids[:, None, :, None].float()
            out = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            return out if attention_mask is None else out * attention_mask[:, None, :, None]

    ids = torch.tensor([[random.randrange(2, 99), 3]])
    ones = torch.ones_like(ids)
    with pytest.raises(RuntimeError):
        Masked().forward(ids[:, :1], attention_mask=ones[:, :1])
    spare_masks(Masked)
    expected = Masked().forward(ids[:, :1])
    assert torch.equal(Masked().forward(ids[:, :1], attention_mask=ones[:, :1]), expected)
    assert not Masked().forward(ids, attention_mask=torch.zeros_like(ids)).any()


class _Generating(nn.Module):
    def forward(self, input_ids: Any = None, attention_mask: Any = None) -> Any:
        if attention_mask is not None:
            raise RuntimeError("sizes do not fit")
        return input_ids * 2

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids, "use_cache": kwargs["use_cache"]}


def test_code_whose_generation_passes_no_mask_gets_none() -> None:
    class Handing(_Generating):
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> dict[str, Any]:
            return {"input_ids": input_ids, **kwargs}

    class Failing(_Generating):
        def prepare_inputs_for_generation(self, input_ids: Any, past: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    ids = torch.tensor([[random.randrange(2, 99), 3]])
    ones = torch.ones_like(ids)

    class Alone(Handing):
        def generate(self, input_ids: Any, **kwargs: Any) -> Any:
            return self(input_ids, **kwargs)

    class Masking(_Generating):
        def generate(self, input_ids: Any, **kwargs: Any) -> Any:
            return self(input_ids, attention_mask=kwargs["mask"])

    classes = (_Generating, Alone, Handing, Failing, Masking)
    assert [hands_no_mask(each(), ones) for each in classes] == [1, 1, 0, 0, 0]
    spare_masks(_Generating, always=True)
    assert torch.equal(_Generating().forward(ids, attention_mask=ones), ids * 2)


def test_what_a_class_saves_besides_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "repository_code_that_saves"
    module = ModuleType(name)
    saving = """class OldLM(OldBase):
    def save_pretrained(self, folder, **kwargs):
        super().save_pretrained(folder, **kwargs)
        raise PermissionError("no file of ours")
"""
    exec(
        _OLD.replace("class OldLM(OldBase):\n", saving).replace("init_weights()", "post_init()"),
        vars(module),
    )
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    facts = bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    assert any("saves more" in fact for fact in facts)
    assert own.OldLM.save_pretrained is PreTrainedModel.save_pretrained


def test_classes_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "repository_code_with_names_of_others"
    module = ModuleType(name)
    twice = "class Linear(nn.Linear):\n    pass\n\nclass OldInner(OldBase):"
    made = _OLD.replace("class OldInner(OldBase):", twice).replace("init_weights()", "post_init()")
    exec(made.replace("nn.Linear(4, 4)", "Linear(4, 4)"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    facts = bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    assert f"Linear of {name} is called OwnLinear" in facts
    assert (own.Linear.__name__, nn.Linear.__name__) == ("OwnLinear", "Linear")
    assert own.OldLM.__name__ == "OldLM"


@pytest.mark.parametrize("static", [False, True])
def test_first_values_keep_the_shapes_of_checkpoints(
    static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "repository_code_that_reshapes"
    module = ModuleType(name)
    reshaping = """    def _init_weights(self, module):
        if isinstance(module, nn.Embedding):
            module.weight.data = torch.ones(32)
        elif isinstance(module, nn.Linear):
            module.weight.data.fill_(3.0)

class OldInner(OldBase):"""
    if static:
        reshaping = reshaping.replace("    def", "    @staticmethod\n    def").replace("self, ", "")
    code = _OLD.replace("class OldInner(OldBase):", reshaping)
    exec(code.replace("init_weights()", "post_init()"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    model = own.OldLM(own.OldConfig(n_deep=3, tie_word_embeddings=False))
    assert model.inner.words.weight.shape == (8, 4)
    assert bool((model.inner.blocks[0].weight == 3.0).all())


def test_first_values_that_fail_are_the_constructors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository_classes, "_failed", {})
    name = "repository_code_whose_first_values_fail"
    module = ModuleType(name)
    failing = """    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.no_such.data.zero_()

class OldInner(OldBase):"""
    code = _OLD.replace("class OldInner(OldBase):", failing)
    exec(code.replace("init_weights()", "post_init()"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    assert repository_classes.failed_first_values() == []
    model = own.OldLM(own.OldConfig(n_deep=3, tie_word_embeddings=False))
    assert bool(model.inner.blocks[0].weight.any())
    said = repository_classes.failed_first_values()
    assert said
    assert all("._init_weights fails for Linear (AttributeError: " in item for item in said)


def test_what_the_old_list_of_weights_meant_is_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    """No class calls post_init(), as code before 4.19 did not; the config says nothing of ties."""
    name = "repository_code_of_2021"
    module = ModuleType(name)
    exec(_OLD, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    facts = bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    model = own.OldLM(own.OldConfig(n_deep=3))
    assert model.head.weight is model.inner.words.weight
    assert own.OldConfig(n_deep=3).num_hidden_layers == 3
    assert any("n_deep has the number of layers" in fact for fact in facts)


@pytest.mark.parametrize(
    "field", ["tie_word_embeddings = False", "tie_word_embeddings: bool = False"]
)
@pytest.mark.parametrize(
    ("version", "said", "ties"),
    [(None, None, True), ("5.0.0", None, False)] + [(None, False, False)],
)
def test_what_a_config_class_of_transformers_4_says_of_ties_beside_its_constructor_is_overwritten(
    field: str, version: str | None, said: bool | None, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "repository_code_that_says_beside"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(_OLD.replace('model_type = "old"', f'model_type = "old"\n    {field}'), vars(module))
    own: Any = module
    own.OldLM._tied_weights_keys = ["head.weight"]
    config = {"model_type": "old", "n_deep": 3, "transformers_version": version}
    config |= {} if said is None else {"tie_word_embeddings": said}
    bring_up_to_date(name, own.OldConfig, own.OldLM, config)
    assert own.OldConfig.from_dict(config).tie_word_embeddings is ties


def test_a_number_of_layers_that_the_config_has_no_field_of_is_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "repository_code_of_dicts"
    module = ModuleType(name)
    code = _OLD.replace("self.n_deep = n_deep", "self.sizes = {'deep': n_deep}")
    exec(code.replace("config.n_deep", "config.sizes['deep']"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    facts = bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 5})
    assert own.OldConfig(n_deep=5).num_hidden_layers == 5
    assert "the config has no num_hidden_layers; the model has 5" in facts


def test_a_table_of_ties_may_name_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "repository_code_that_ties_modules"
    module = ModuleType(name)
    exec(_OLD, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    own.OldLM._tied_weights_keys = {"head": "inner.words"}
    bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    assert own.OldLM._tied_weights_keys == {"head.weight": "inner.words.weight"}


def test_a_model_that_says_nothing_of_its_embeddings_ties_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "repository_code_that_says_nothing"
    module = ModuleType(name)
    exec(re.sub(r"    def get_\w+_embeddings.*\n.*\n", "", _OLD), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    facts = bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    assert "the weights that transformers 4 ties: {}" in facts


@pytest.mark.parametrize(
    ("version", "imported", "ties"),
    [("4.53.2", "", False), ("4.57.1", "", True), ("5.0.0", "", False)]
    + [(None, "from transformers.utils import TransformersKwargs", True)],
)
def test_code_for_a_late_transformers_4_need_not_say_which_its_embeddings_are(
    version: str | None, imported: str, ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"repository_code_of_2025_{version}"
    module = ModuleType(name)
    text = re.sub(r"    def get_\w+_embeddings.*\n.*\n", "", _OLD).replace("inner", "model")
    text = text.replace("words", "embed_tokens").replace("head", "lm_head")
    exec(imported + text, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    own.OldLM._tied_weights_keys = ["lm_head.weight"]
    config = {"model_type": "old", "n_deep": 3, "transformers_version": version}
    bring_up_to_date(name, own.OldConfig, own.OldLM, config)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if ties else {}
    assert own.OldLM._tied_weights_keys == tied


def test_methods_that_tie_weights_take_what_they_are_given_today(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "repository_code_that_ties_by_itself"
    module = ModuleType(name)
    ties = "    def tie_weights(self):\n        self.head.weight = self.inner.words.weight\n"
    exec(_OLD + ties, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    model = own.OldLM(own.OldConfig(n_deep=3))
    model.tie_weights(recompute_mapping=False)
    assert model.head.weight is model.inner.words.weight


def test_what_a_constructor_ties_itself_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of its embeddings; a module that lies at two places is no tie."""
    name = "repository_code_that_ties_itself"
    module = ModuleType(name)
    silent = re.sub(r"    def get_\w+_embeddings.*\n.*\n", "", _OLD)
    tying = "self.inner.words.weight = self.head.weight\n        self.again = self.inner"
    exec(re.sub(r"( +)(self\.head = .*)", rf"\1\2\n\1{tying}", silent), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    own: Any = module
    facts = bring_up_to_date(name, own.OldConfig, own.OldLM, {"model_type": "old", "n_deep": 3})
    assert own.OldLM._tied_weights_keys == {"head.weight": "inner.words.weight"}, facts


def test_code_that_is_imported_anew_is_read_with_its_new_classes(tmp_path: Path) -> None:
    """As it is where a constructor asks for a package that is stood in for."""
    (tmp_path / "modeling_x.py").write_text("class Part:\n    pass\n")
    try:
        for _ in range(2):
            make_package(tmp_path)
            module = importlib.import_module(f"{PACKAGE}.modeling_x")
            assert module_source(module.__name__).namespace["Part"] is module.Part
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]


def test_masks_are_made_with_the_arguments_of_other_years(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, maker in list(vars(masking_utils).items()):
        monkeypatch.setattr(masking_utils, name, maker)  # put back behind the test
    facts = interfaces._masks_by_old_names()
    config = PretrainedConfig(num_hidden_layers=1)
    config._attn_implementation = "eager"
    make: Any = masking_utils.create_causal_mask
    given = {"config": config, "attention_mask": None, "past_key_values": None}
    text = torch.zeros(1, 5, 4)
    old = make(input_embeds=text, cache_position=torch.arange(5), **given)
    assert facts
    assert torch.equal(old, make(inputs_embeds=text, **given))
    assert make.__module__ == "transformers.masking_utils"


def test_without_a_gpu_code_for_one_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for owner, name in (
        (torch.Tensor, "cuda"),
        (nn.Module, "cuda"),
        (torch.cuda, "current_device"),
        (torch.cuda, "stream"),
        (torch.cuda, "current_stream"),
        (torch.cuda, "default_stream"),
        *((torch.cuda.nvtx, name) for name in ("mark", "range_pop", "range_push")),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    assert interfaces._without_cuda()
    here = torch.zeros(2, device=torch.cuda.current_device()).cuda()
    assert here.device.type == nn.Linear(2, 2).cuda().weight.device.type == "cpu"
    with torch.cuda.stream(torch.cuda.default_stream(here.device)):
        assert torch.cuda.current_stream() is None
    torch.cuda.nvtx.range_push("here")  # which raises in a build without CUDA
    torch.cuda.nvtx.range_pop()


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("def __init__(self, dim, device='cuda'): pass", True),
        ('def __init__(self, dim, device: str | None = "cuda:0"): pass', True),
        ("x = torch.arange(4).float().to('cuda')", True),
        ("torch.device(f'cuda:{rank}')", True),
        ("if x.device.type == 'cuda': y = x.contiguous()", False),
        ("with torch.autocast(device_type='cuda'): pass", False),
    ],
)
def test_without_a_gpu_what_is_put_on_one_by_its_name_stays_on_the_cpu(
    text: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(interfaces._OnCpu, "entered", False)
    monkeypatch.setattr(interfaces._OnCpu, "__enter__", lambda mode: entered.append(mode))
    assert bool(interfaces.stay_on_cpu(text)) == is_named == bool(entered)
    assert not interfaces.stay_on_cpu(text)  # once is enough


def test_functions_that_are_told_the_name_of_a_gpu_make_tensors_on_the_cpu() -> None:
    with interfaces._OnCpu():
        made = (
            torch.arange(4, device="cuda").float().to("cuda:1").to(torch.device("cuda"), torch.half)
        )
        layer = nn.Linear(2, 2, device="cuda").to("cuda")
        on_meta = torch.zeros(3, device="meta")
    assert (made.device.type, made.dtype, made.tolist()) == ("cpu", torch.half, [0, 1, 2, 3])
    assert (layer.weight.device.type, on_meta.device.type) == ("cpu", "meta")


def test_old_code_counts_the_fields_of_rope_scaling() -> None:
    given = {"type": "dynamic", "factor": 2.0}
    scaling: Any = PlainConfig(rope_theta=10.0, rope_scaling=dict(given)).rope_scaling
    assert dict(scaling) == given
    assert "rope_type" in scaling
    assert scaling["rope_type"] == scaling.get("rope_type", "default") == "dynamic"
    assert scaling.get("beta_fast", 32) == 32
    with pytest.raises(KeyError):
        scaling["beta_fast"]
    newer = PlainConfig(rope_theta=10.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert newer.rope_scaling == {"type": "linear", "factor": 2.0}


def test_kinds_of_layers_that_a_base_does_not_know_are_taken_again() -> None:
    """The base's constructor checks those that a constructor sets behind it, in a config made anew."""

    class Own(OldFields, MistralConfig):  # type: ignore[misc]
        def __init__(self, layout: Any = "am", **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.layout = layout
            self.layer_types = [{"a": "full_attention", "m": "mamba2"}[key] for key in layout]

    again: Any = Own.from_dict(Own(num_hidden_layers=2).to_dict())
    assert again.layer_types == ["full_attention", "mamba2"]
    with pytest.raises(Exception, match="mamba2"):
        MistralConfig(num_hidden_layers=2, layer_types=again.layer_types)


def test_a_constructor_that_sets_rope_scaling_last_keeps_the_base() -> None:
    """That of its base has put both into one table."""

    class Own(OldFields, LlamaConfig):  # type: ignore[misc]
        def __init__(self, rope_scaling: Any = None, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.rope_scaling = rope_scaling

    given = {"type": "linear", "factor": 4.0}
    made: Any = Own.from_dict({"rope_theta": 100.0, "rope_scaling": dict(given)})
    again: Any = Own.from_dict(made.to_dict())
    for config in (made, again):
        assert (config.rope_theta, config.rope_scaling) == (100.0, given)
    assert Own(rope_theta=50.0).rope_theta == 50.0


@pytest.mark.parametrize("given", [1.0, 4, "none"])
@pytest.mark.parametrize("before", [True, False])
def test_a_field_that_is_called_rope_scaling_may_be_no_table(given: Any, before: bool) -> None:
    class Own(PlainConfig):
        model_type = "own"

        def __init__(self, rope_scaling: Any = 2.0, **kwargs: Any) -> None:
            if before:
                self.rope_scaling = rope_scaling
            super().__init__(**kwargs)
            self.rope_scaling = rope_scaling

    made: Any = Own.from_dict({"rope_scaling": given, "rope_theta": 100.0})
    assert (made.rope_scaling, made.rope_theta) == (given, 100.0)
    assert Own().rope_scaling == Own.from_dict(Own().to_dict()).rope_scaling == 2.0
    assert Own.from_dict(made.to_dict()).rope_scaling == given
    made.rope_scaling = {"type": "linear", "factor": 4.0}
    assert made.rope_scaling == {"type": "linear", "factor": 4.0}
    made.rope_scaling = None
    assert made.rope_scaling is None


def test_rows_of_a_cut_table_are_compared_and_nothing_else_is_cut() -> None:
    table = torch.randn(9, 4)
    cut = cut_tables(nn.Identity(), (table, table), (table[:5], table[:5]))
    assert [item.shape[0] for item in cut] == [5, 5]
    assert cut_tables(nn.Linear(4, 4), table, table[:5]) is table
    assert cut_tables(nn.Identity(), table, table[:, :3]) is table
    assert cut_tables(nn.Identity(), table[:5], table) is not None
    assert cut_tables(nn.Identity(), table[:5], table).shape[0] == 5


def test_rows_of_a_table_for_all_texts_are_compared_for_each() -> None:
    table = torch.randn(9, 1, 4, generator=torch.Generator().manual_seed(16))
    ours = torch.zeros(2, 5, 4)
    for theirs in (table, table[:, 0], table[:5], table[:, None]):
        assert torch.equal(rows_for_each_text(theirs, ours), table[:5, 0].expand(2, 5, 4))
    kept = rows_for_each_text(table, torch.zeros(2, 5, 1, 4))
    assert torch.equal(kept, table[:5].expand(2, 5, 1, 4))
    for other in (table[:4], torch.randn(9, 2, 4), torch.randn(9, 1, 3), torch.randn(5)):
        assert rows_for_each_text(other, ours) is other
    longer = table[:, 0][None, None]  # by a caller that asks for more rows than a text has
    before_tokens = rows_for_each_text(longer, torch.zeros(2, 1, 5, 4))
    assert torch.equal(before_tokens, longer[:, :, :5].expand(2, 1, 5, 4))
    for other in (longer[:, :, :4], longer[..., :3], longer.expand(1, 3, 9, 4)):
        assert rows_for_each_text(other, torch.zeros(2, 1, 5, 4)) is other
    states = torch.randn(2, 1, 21, 6)  # of texts, heads and tokens: nothing is a table there
    assert rows_for_each_text(states, torch.zeros_like(states)) is states


@pytest.mark.parametrize(
    ("size", "number", "expected"),
    [
        (True, False, (256, 4, 2, 64)),
        (False, True, (2048, 128, 8, 16)),
        (True, True, (8192, 128, 8, 64)),
    ],
)
def test_heads_can_keep_their_size_and_number(
    size: bool, number: bool, expected: tuple[int, ...]
) -> None:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    values: dict[str, Any] = dict(zip(names, (64, 4, 2, 16), strict=True))
    full = dict(zip(names, (8192, 128, 8, 64), strict=True))
    keep_heads(values, full, {}, size=size, number=number)
    assert values == dict(zip(names, expected, strict=True))


@pytest.mark.parametrize(("turned", "kept"), [(64, (64, 76)), (48, (8, 20))])
def test_channels_turned_by_tables_of_a_heads_share_stay_as_many(
    turned: int, kept: tuple[int, int]
) -> None:
    full = {"hidden_size": 1024, "num_attention_heads": 16, "qk_rope_head_dim": turned}
    small: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "qk_rope_head_dim": 8}
    small |= {"qk_nope_head_dim": 12, "qk_head_dim": 20}
    keep_heads(small, full, {}, size=True, number=False)
    assert (small["qk_rope_head_dim"], small["qk_head_dim"]) == kept
    assert small["hidden_size"] == 256


def test_a_constant_of_one_number_is_a_table_and_a_start_is_not() -> None:
    assert is_table(torch.tensor(-1e9))
    assert not is_table(torch.tensor(1.0))
    assert not is_table(torch.tensor(float("inf")))


def test_configs_have_the_fields_of_transformers_4_and_can_be_saved(tmp_path: Path) -> None:
    config: Any = PlainConfig()
    assert (config.max_length, config.num_beams, config.pruned_heads) == (20, 1, {})
    config.save_pretrained(tmp_path)
    assert "max_length" not in (tmp_path / "config.json").read_text()
