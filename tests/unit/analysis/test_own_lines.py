"""What a model's own code does where a small model is made and reads texts: lines that run, tables
that a forward makes again, where an error comes from.
"""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onboard.analysis import repository
from onboard.analysis.behaviour.apart import check_repeats
from onboard.analysis.behaviour.kept_tables import keeps_table
from onboard.analysis.behaviour.lines_run import lines_run
from onboard.analysis.repository import make_package
from onboard.analysis.repository_source import PACKAGE
from onboard.analysis.source import module_source
from onboard.analysis.tiny.own_failures import refuse_own_code
from onboard.analysis.tiny.tiny_config import one_line
from onboard.analysis.tiny.tiny_prompts import from_zero, prompt
from onboard.errors import OnboardError

TABLES = """
import torch
from torch import nn

class Tables(nn.Module):
    def __init__(self, size, longest):
        super().__init__()
        self.size, self.longest = size, longest
        self.make(longest, 1.0)

    def make(self, length, factor):
        angles = torch.outer(torch.arange(length) / factor, 1.0 / torch.arange(1, self.size + 1))
        self.register_buffer("cos", angles.cos()[None], persistent=False)

    def forward(self, length):
        HOW
        return self.cos[0, :length]


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(200, config.size)
        self.config = config
        self.tables = Tables(config.size, 12)
        self.notes = []
        for part in range(3):
            self.notes.append(part)

    def forward(self, input_ids, position_ids=None, use_cache=False):
        if input_ids.shape[1] > 1000:
            raise ValueError("long")
        return self.words(input_ids) * self.tables(input_ids.shape[1])
"""
AGAIN = "self.make(max(length, self.longest), 1.0)"


@pytest.fixture
def own(tmp_path: Path) -> Any:
    def written(text: str) -> Any:
        (tmp_path / "modeling_own.py").write_text(text, encoding="utf-8")
        make_package(tmp_path)
        return importlib.import_module(f"{PACKAGE}.modeling_own")

    yield written
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (AGAIN, True),
        ("self.make(max(length, self.longest), max(length / self.longest, 1.0))", False),
        ("self.make(length, 1.0 + length)", False),
        ("self.cos = torch.zeros(1, 99, 4)", False),
    ],
    ids=["the same", "stretched by a long text", "stretched by any text", "another one"],
)
def test_a_table_that_a_forward_makes_again_is_known_by_its_numbers(
    how: str, kept: bool, own: Any
) -> None:
    module = own(TABLES.replace("HOW", how))
    model = module.Model(SimpleNamespace(size=4, longest=12))
    assert keeps_table(model, module.Tables, "cos") == kept
    assert model.tables.cos.shape[1] == 12  # it was a copy that read the texts


def test_a_table_that_grows_from_a_number_of_no_config_is_not_kept(own: Any) -> None:
    module = own(TABLES.replace("HOW", AGAIN))
    model = module.Model(SimpleNamespace(size=4, longest=512))
    assert not keeps_table(model, module.Tables, "cos")


def test_lines_are_counted_where_they_begin(own: Any) -> None:
    module = own(TABLES.replace("HOW", AGAIN))
    config = SimpleNamespace(size=4)
    counts = lines_run(module.Model(config), config)
    lines = TABLES.replace("HOW", AGAIN).splitlines()
    number = {line.strip(): place for place, line in enumerate(lines, 1)}
    found = {line: counts[module.__file__, place] for line, place in number.items()}
    assert found["self.notes.append(part)"] == 3
    assert found["return self.cos[0, :length]"] == 1
    assert found['raise ValueError("long")'] == 0


def test_an_error_says_where_in_a_repositorys_code_it_comes_from(own: Any) -> None:
    module = own("import json\n\n\ndef read(text):\n    return json.loads(text)\n")
    with pytest.raises(ValueError, match="property name") as caught:
        module.read("{")
    assert one_line(caught.value).endswith(", at modeling_own.py:5")
    assert one_line(ValueError("x")) == "ValueError: x"
    assert one_line(AssertionError()) == "AssertionError"


FAILING = """
import torch
from types import SimpleNamespace
from torch import nn

_scan = type("JITFunction", (), {"__module__": "triton.runtime.jit"})()

def scanned(x):
    return _launch(x)

def _launch(x):
    return _scan[(1,)](x)

def guarded(function):
    def wrapper(x):
        with x.device.index:
            return function(x)
    return wrapper

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(200, 4)

    def forward(self, SIGNATURE, use_cache=False, **kwargs):
        x = self.words(input_ids)
        BODY
        return SimpleNamespace(logits=x)
"""
_USUAL = "input_ids, position_ids=None, attention_mask=None"


@pytest.mark.parametrize(
    ("signature", "body", "said"),
    [
        ("tokens", "", "Model.forward takes tokens and no input_ids"),
        (
            _USUAL,
            "x = x if position_ids is None else x[:, :, position_ids[:, :, 9]]",
            "takes no position_ids of several texts, .* at modeling_own.py:27",
        ),
        (
            _USUAL,
            "x = torch.rand_like(x) if position_ids is None else x[:, :, position_ids[:, :, 9]]",
            "at modeling_own.py:27; and it draws random numbers",
        ),
        (
            _USUAL,
            "x = None + 1 if position_ids is None else x[:, :, position_ids[:, :, 9]]",
            "IndexError: .*, at modeling_own.py:27; with tokens alone: TypeError: .*:27",
        ),
        (
            _USUAL,
            "import no_such_products.ops",
            "imports no_such_products, which is not here .*at modeling_own.py:27",
        ),
        (
            _USUAL,
            "x = None + 1 if input_ids is not None else _scan[(1,)](x)",
            "runs Triton kernels, _scan first, which need a GPU, .*TypeError.*:27",
        ),
        (_USUAL, "x = guarded(scanned)(x)", "Triton kernels, _scan first, .*modeling_own.py:16"),
        (
            f"{_USUAL}, labels=None",
            "loss = (labels[:, 1:] == 3).sum()",
            "computes a loss whatever it is given: TypeError.*:27",
        ),
    ],
    ids=[
        "no tokens",
        "no positions",
        "random",
        "either way",
        "package",
        "kernel",
        "around one",
        "loss",
    ],
)
def test_why_own_code_does_not_run_is_said_in_a_line(
    signature: str, body: str, said: str, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = own(FAILING.replace("SIGNATURE", signature).replace("BODY", body))
    with pytest.raises(OnboardError, match=said) as caught:
        refuse_own_code(module.Model(), from_zero(prompt(0)))
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "meets"),
    [
        ('assert False, "only plain RoPE"', True),
        ('if True: raise NotImplementedError("only plain RoPE")', True),
        ("assert False", False),
        ("one, other = (1,)", False),
        ("torch.zeros(2).view(3)", False),
    ],
)
def test_the_hint_of_the_codes_own_check_is_to_meet_it(body: str, meets: bool, own: Any) -> None:
    module = own(FAILING.replace("SIGNATURE", _USUAL).replace("BODY", body))
    with pytest.raises(OnboardError) as caught:
        refuse_own_code(module.Model(), from_zero(prompt(0)))
    assert ("a check of its own: have the config, or a copy" in str(caught.value.hint)) == meets
    assert "See whether it runs with" in str(caught.value.hint)


def test_the_hint_names_the_transformers_of_the_config(own: Any, monkeypatch: Any) -> None:
    model_class = own(FAILING.replace("SIGNATURE", _USUAL).replace("BODY", "")).Model
    assert "the transformers of its time" in repository.what_to_do(model_class, ValueError())
    monkeypatch.setitem(repository._written_for, "modeling_own.Model", "4.31.0")
    assert "runs with transformers 4.31.0, and bring a copy" in repository.what_to_do(
        model_class, ValueError()
    )


def test_the_hint_says_that_code_gets_no_environment(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FAILING.replace("BODY", 'os.getenv("OWN_NORM").lower()').replace(
        "import", "import os,", 1
    )
    module = own(text.replace("SIGNATURE", _USUAL))
    monkeypatch.setattr(repository, "_environment", {})
    read = 'at = os.environ.get("OWN_AT", "here"); os.environ["OWN_OUT"] = at\n'
    said = [*repository._without_environment("modeling_own.py", text + read)]
    assert [item.split()[5] for item in said] == ["OWN_AT,", "OWN_NORM,"]
    with pytest.raises(OnboardError, match="AttributeError.*modeling_own.py:27") as caught:
        refuse_own_code(module.Model(), from_zero(prompt(0)))
    assert str(caught.value.hint).startswith("OWN_NORM is an environment variable, and this code")
    monkeypatch.setenv("OWN_AT", "there")
    again = [*repository._without_environment("modeling_own.py", text + read)]
    assert [item.split()[5] for item in again] == ["OWN_NORM,"]


@pytest.mark.parametrize("loaded", ["AutoTokenizer", "AutoConfig"])
def test_code_that_loads_a_repositorys_files_is_told_so(
    loaded: str, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = f"from transformers import {loaded}\nkept = {loaded}.from_pretrained('of/none')\n"
    with pytest.raises(OSError, match="of/none|offline") as met:
        own(text)
    refusal = repository._failure("modeling_own.Model", "cannot be imported", met.value)
    assert str(refusal).startswith(
        "the model's code, modeling_own.Model, cannot be imported (it loads files of a repository "
        "by its name, at modeling_own.py:2). Code gets its own repository's Python and JSON files, "
        "and no network: have a copy"
    )


@pytest.mark.parametrize("path", ["kernels.cpp", "/nowhere/weights.bin"])
def test_the_hint_names_a_file_of_the_code_that_is_missing(path: str, own: Any) -> None:
    module = own(FAILING.replace("BODY", f"open({path!r})").replace("SIGNATURE", _USUAL))
    with pytest.raises(OnboardError, match="FileNotFoundError.*modeling_own.py") as caught:
        refuse_own_code(module.Model(), from_zero(prompt(0)))
    its_own = str(caught.value.hint).startswith("the code wants a file of its own, kernels.cpp,")
    assert its_own is (path == "kernels.cpp")


@pytest.mark.parametrize("drawn", [True, False])
def test_a_model_that_draws_random_numbers_is_refused(drawn: bool, own: Any) -> None:
    body = "x = x + torch.rand_like(x)" if drawn else ""
    module = own(FAILING.replace("SIGNATURE", _USUAL).replace("BODY", body))
    model = module.Model()
    if drawn:
        with pytest.raises(OnboardError, match="draws random numbers"):
            check_repeats(lambda: model, 200)
    else:
        check_repeats(lambda: model, 200)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_of_random_numbers_is_a_weight_if_checkpoints_have_it(
    persistent: bool, own: Any
) -> None:
    module = own(FAILING.replace("SIGNATURE", _USUAL).replace("BODY", "x = x + self.kept"))
    model = module.Model()

    def make() -> Any:
        made = copy.deepcopy(model)
        made.register_buffer("kept", torch.rand(1), persistent=persistent)
        return made

    if persistent:
        check_repeats(make, 200)
    else:
        with pytest.raises(OnboardError, match="draws random numbers"):
            check_repeats(make, 200)


def test_a_model_that_hashes_is_told_so(own: Any) -> None:
    body = "x = x + hash(bytes([1])) * 0 + torch.rand_like(x)"
    model = own(FAILING.replace("SIGNATURE", _USUAL).replace("BODY", body)).Model()
    with pytest.raises(OnboardError, match=r"calls hash\(\), at modeling_own\.py:\d+"):
        check_repeats(lambda: model, 200)


def test_a_model_that_gives_no_numbers_is_told_as_such(own: Any) -> None:
    body = "x = x / (x - x)"
    model = own(FAILING.replace("SIGNATURE", _USUAL).replace("BODY", body)).Model()
    with pytest.raises(OnboardError, match="gives no finite numbers"):
        check_repeats(lambda: model, 200)


def test_a_line_of_a_longer_module_has_no_blank_line_before_it() -> None:
    source = module_source("onboard.hf.quiet")
    lines = source.text.splitlines()
    assert not source.is_apart(len(lines) + 9)
    blank = next(place for place, line in enumerate(lines, 1) if not line)
    assert source.is_apart(blank + 1)


def test_an_assertion_without_a_message_is_told_by_its_test() -> None:
    sizes = [3]
    with pytest.raises(AssertionError) as caught:
        assert all(size < 3 for size in sizes)
    bare = AssertionError().with_traceback(caught.value.__traceback__)
    assert one_line(bare) == "AssertionError: assert all(size < 3 for size in sizes)"
    assert one_line(AssertionError("too long")) == "AssertionError: too long"
