"""The allow-list of model files: it passes whatever is generated, and nothing that reaches beyond
tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onboard.analysis.spec import ModelSpec
from onboard.errors import CONSENT, OnboardError
from onboard.modeling import load_model_file, registered_config
from onboard.vetting.model_text import MOST, vet_model_text
from onboard.workflow.remote.vet import vet_model_file

MODELS = sorted((Path(__file__).parents[3] / "models").glob("modeling_*.py"))

_OWN = '''"""A model file."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

import onboard.ops  # noqa: F401
from onboard.modeling import CausalLMOutput, register_causal_lm, register_config
from onboard.plain_config import PlainConfig

TABLE = {"a": (1, -2.5)}


class XConfig(PlainConfig):
    """A config."""

    model_type = "x"

    def __init__(self, width=4, **kwargs) -> None:
        self.width = width
        super().__init__(**kwargs)


class XModel(nn.Module):
    """A model."""

    def __init__(self, config: XConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.width, 2)
        self.act = ACT2FN["silu"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        PLACE
        return F.pad(self.act(self.proj(x)), (0, math.floor(2.5))).view(*x.shape[:-1], -1)


TOP
register_config(XConfig)
register_causal_lm("XConfig", XModel)
'''


def _file(place: str = "pass", top: str = "") -> str:
    return _OWN.replace("PLACE", place.replace("\n", "\n        ")).replace("TOP", top)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_committed_model_file_passes(path: Path) -> None:
    vet_model_text(path.read_text())


def test_there_are_model_files() -> None:
    assert len(MODELS) > 40


def test_a_file_with_its_own_config_passes() -> None:
    vet_model_text(_file())
    vet_model_text(_file().replace("self.width = width", "self.torch_dtype = self.width = width"))


def test_layers_that_only_compute_may_be_used() -> None:
    vet_model_text(_file("x = nn.AvgPool2d((2, 2))(x) + F.max_pool2d(F.avg_pool2d(x, 2), 2)"))


@pytest.mark.parametrize(
    "place",
    [
        "x = torch.greater_equal(x, 0).negative() + torch.trunc(x.exp2())",
        "x.sigmoid_().squeeze_(0).unsqueeze_(0).clamp_min_(0)",
        "rows, columns = torch.tril_indices(4, 4)\nx = x.diagonal().ravel()[rows]",
        "x = F.hardtanh(F.interpolate(x, scale_factor=2.0), math.atan2(-1.0, 1.0), math.fabs(-2.0))",
        "self.act = nn.Hardtanh()\nx = self.act(x) if x.is_contiguous() else x.true_divide(2)",
        "self.args = {'width': 4}\nx = x.view(-1, self.args['width'])",
        "self.name = 'x'\nself.bits = 4\nself.center = x.copysign(x)",
    ],
)
def test_what_only_computes_may_be_used(place: str) -> None:
    vet_model_text(_file(place))


def test_a_part_of_a_part_may_be_replaced() -> None:
    vet_model_text(_file("self.proj.norm = nn.Linear(2, 2)"))
    vet_model_text(_file("self.norm = nn.BatchNorm1d(2, affine=False)"))


@pytest.mark.parametrize("attr", ["out", "wo", "Tensor", "default"])
def test_parts_of_a_model_may_be_called_like_overloads_of_ops(attr: str) -> None:
    vet_model_text(_file(f"self.{attr} = nn.Linear(2, 2)\nx = self.{attr}(x)"))


@pytest.mark.parametrize(
    "top",
    [
        "import os",
        "import torch.hub",
        "import torch.os",
        "import torch as t",
        "from torch import load",
        "from torch import load as x",
        "from torch import os",
        "from torch.nn import *",
        "from collections import abc",
        "from . import x",
        "from transformers.modeling_rope_utils import logger",
        "from transformers.activations import math",
        "from transformers import AutoConfig as nn",
        "from onboard.hub import open_source",
        "from repository_code.modeling_x import M",
        "_T = torch.os.popen('id').read()",
        "_T = torch.zeros(1)",
        "torch.zeros(1)",
        "print(1)",
        "if True:\n    pass",
        "for x in (1,):\n    pass",
        "register_config(XConfig())",
        "def f(x=torch.zeros(1)):\n    return x",
        "@torch.compile\ndef f(x):\n    return x",
        "@staticmethod\nasync def f(x):\n    return x",
        "class A(torch.nn.modules.module.Module):\n    pass",
        "class A(nn.Module, metaclass=XConfig):\n    pass",
        "class A(nn.Module):\n    x = torch.zeros(1)",
        "class A(nn.Module):\n    def __reduce__(self):\n        return 1",
        "torch = 1",
        "def eval(x):\n    return x",
        "def f(nn):\n    return nn.os",
        "def f() -> torch.os.x:\n    return 1",
        "def f(x: eval('1')):\n    return 1",
        "type X = int",
        "def",
        "x = " + "(" * 5000 + ")" * 5000,
        "x = " + "-" * 100_000 + "1",
        "#" * MOST,
        "x = '\0'",
    ],
)
def test_what_is_on_no_list_is_refused_at_the_top(top: str) -> None:
    with pytest.raises(OnboardError, match="not known to be harmless") as raised:
        vet_model_text(_file(top=top))
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "place",
    [
        "torch.os.system('id')",
        "torch.sys.modules['os']",
        "torch.utils.cpp_extension.load(name='x')",
        "torch.jit.script(x)",
        "torch.load('x')",
        "torch.save(x, 'x')",
        "torch.from_file('x')",
        "torch.ops.load_library('x')",
        "torch.ops.aten.from_file('x')",
        "torch.ops.onboard.__class__",
        "torch.ops.onboard.torch_attention._op",
        "torch.ops.onboard.torch_attention.out(x, out=x)",
        "torch.ops.aten.add.out(x, x, out=x)",
        "torch.nn.modules.os",
        "nn.modules.module.torch.os",
        "nn.Module.load_state_dict",
        "F.os",
        "math.os",
        "y = torch\ny.os",
        "y = nn\ny.modules",
        "(torch).os",
        "[torch][0].os",
        "torch.Tensor.__class__",
        "x.numpy().tofile('x')",
        "x.untyped_storage().from_file('x', True, 1)",
        "x.share_memory_()",
        "x.apply_(self.act)",
        "x.map_(x, self.act)",
        "x.set_(x)",
        "x.resize_(9)",
        "x.as_strided((9,), (9,))",
        "torch.as_strided(x, (9,), (9,))",
        "x.data_ptr()",
        "torch.frombuffer(x)",
        "torch.compile(x)",
        "x.register_hook(print)",
        "x.__class__.__bases__",
        "self.__dict__",
        "self.forward.__globals__",
        "self._modules.clear()",
        "self.load_state_dict({})",
        "self.compile()",
        "self.save_pretrained('x')",
        "(y for y in x).gi_frame.f_builtins",
        "'{0.__class__}'.format(x)",
        "getattr(x, '__class__')",
        "getattr(torch, 'os')",
        "getattr(x, y)",
        "getattr(x, f'{x}')",
        "getattr(x, f'{x}s__')",
        "getattr(x, f'{x}_frame')",
        "setattr(x, 'a', 1)",
        "eval('1')",
        "exec('1')",
        "open('x')",
        "__import__('os')",
        "globals()",
        "breakpoint()",
        "print(x)",
        "undefined(x)",
        "XConfig.from_pretrained('x')",
        "x.config.to_json_file('x')",
        "x.config.push_to_hub('x')",
        "nn.Linear.forward = self.proj",
        "self.forward = x",
        "self.proj.forward = x",
        "self.proj.norm.forward = x",
        "self.proj.__class__ = x",
        "ACT2FN['silu'] = x",
        "ACT2FN.update(x)",
        "self.table = ACT2FN",
        "register_config(XConfig)",
        "del self.proj",
        "import os",
        "from torch import load",
        "global x",
        "with x:\n    pass",
        "try:\n    pass\nexcept ValueError:\n    pass",
        "while True:\n    pass",
        "while x:\n    y = x",
        "yield x",
        "(y := torch.os)",
        "assert torch.os",
        "y = [torch.os for _ in x]",
        "y = lambda z=torch.os: z",
        "y = f'{torch.os}'",
        "y = x[torch.os]",
        "match x:\n    case torch.os:\n        pass",
    ],
)
def test_what_is_on_no_list_is_refused_in_a_method(place: str) -> None:
    with pytest.raises(OnboardError, match="not known to be harmless"):
        vet_model_text(_file(place))


def _spec(**changed: str) -> ModelSpec:
    fields = {"family": "x", "architecture": "XModel", "config_class": "XConfig"} | changed
    return ModelSpec.model_construct(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"family": "llama"}, "another model type than llama"),
        ({"architecture": "Y"}, "registers XConfig, XModel, not XConfig and Y"),
        ({"config_class": "LlamaConfig"}, "registers XConfig, XModel"),
    ],
)
def test_a_file_registers_the_classes_of_its_spec(changed: dict[str, str], message: str) -> None:
    vet_model_file(_file(), _spec())
    with pytest.raises(OnboardError, match=message):
        vet_model_file(_file(), _spec(**changed))


def test_a_config_class_may_be_an_heir_of_one_of_transformers() -> None:
    text = _file().replace("import PlainConfig", "import OldFields")
    text = text.replace("import math\n", "import math\nfrom transformers import LlamaConfig\n")
    text = text.replace("XConfig(PlainConfig)", "XConfig(OldFields, LlamaConfig)")
    vet_model_file(text, _spec())
    with pytest.raises(OnboardError, match="another model type"):
        vet_model_file(text.replace('model_type = "x"', 'model_type = "llama"'), _spec())


@pytest.mark.parametrize(
    ("old", "new", "passes"),
    [
        ("self.width = width", "self.backward = width", True),
        ("self.width = width", "self.to_dict = width", False),
        ("self.width = width", "self.__class__ = width", False),
        ("self.width = width", "self._grad = width", False),
        ("self.width = width", "self.width.backward = width", False),
        ("self.width = width", "self.width = self.backward", False),
        ("XConfig(PlainConfig)", "XConfig(nn.Module)", False),
        ("self.proj = nn.Linear(config.width, 2)", "self.backward = config.width", False),
        ("config.width", "config.backward", False),
    ],
)
def test_a_config_may_keep_what_only_tensors_have_a_method_for(
    old: str, new: str, passes: bool
) -> None:
    text = _file().replace(old, new)
    if new.startswith("XConfig"):
        text = text.replace("self.width = width", "self.backward = width")
    if passes:
        vet_model_text(text)
    else:
        with pytest.raises(OnboardError, match="not known to be harmless"):
            vet_model_text(text)


def test_a_file_that_looks_like_transformers_own_is_refused() -> None:
    text = _file().replace("from onboard.plain_config import PlainConfig", "")
    with pytest.raises(OnboardError):
        vet_model_file(text, _spec())
    other = re.sub(r"class XConfig.*?super\(\).__init__\(\*\*kwargs\)\n", "", text, flags=re.DOTALL)
    other = other.replace("register_config(XConfig)", "").replace("XConfig", "LlamaConfig")
    other = other.replace("import math\n", "import math\nfrom transformers import LlamaConfig\n")
    with pytest.raises(OnboardError, match="registers"):
        vet_model_file(
            other.replace("register_causal_lm, register_config", "register_causal_lm"), _spec()
        )


def test_a_file_on_the_disk_is_looked_at_before_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, path = tmp_path / "outside", tmp_path / "modeling_x.py"
    monkeypatch.delenv(CONSENT, raising=False)
    path.write_text(_file(top=f"torch.sys.modules['os'].mkdir({str(outside)!r})"))
    with pytest.raises(OnboardError, match="modeling_x.py: .*read it, then set ONBOARD_TRUST"):
        load_model_file(path)
    assert not outside.exists()
    monkeypatch.setenv(CONSENT, "1")
    load_model_file(path)
    assert outside.is_dir()

    monkeypatch.delenv(CONSENT)
    path.write_text(_file())
    load_model_file(path)
    assert registered_config("x").__module__.startswith("onboard_generated_modeling_x")


def test_classes_of_torch_nn_may_be_imported_by_those_of_their_names_that_are_listed() -> None:
    vet_model_text("from torch.nn import Linear, Parameter\n")
    for name in ("Parameter as nn", "DataParallel", "utils", "init", "Module.mro"):
        with pytest.raises(OnboardError):
            vet_model_text(f"from torch.nn import {name}\n")
