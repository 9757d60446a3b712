"""Config classes as code of transformers 4 has them: what their objects are made by, and show."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig

from onboard.codegen.config_checks import check_same_values
from onboard.codegen.config_class import plain_config_class
from onboard.hf.old.own_configs import inherit_constructors, lend_fields, read_made_configs
from onboard.plain_config import OLD_ROPE_SCALING

_COMMON = """
from transformers import PretrainedConfig


class Common(PretrainedConfig):
    def __init__(self, width=64, heads=None, **kwargs):
        self.width = width
        self.heads = width // 16 if heads is None else heads
        super().__init__(**kwargs)
"""
_HEIR = """
from {common} import Common


class Between(Common):
    pass


class Heir(Between):
    model_type = "heir"
"""
_FIELDS = """
from transformers import PretrainedConfig


class Heir(PretrainedConfig):
    model_type = "heir"
    width: int = 3
"""
_COUNT = itertools.count()


@pytest.fixture
def heir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the class `Heir` of a file beside another one, `Common`."""
    monkeypatch.syspath_prepend(tmp_path)

    def heir(text: str) -> Any:
        common, name = (f"of_their_year_{next(_COUNT)}" for _ in range(2))
        (tmp_path / f"{common}.py").write_text(_COMMON)
        (tmp_path / f"{name}.py").write_text(text.format(common=common))
        importlib.invalidate_caches()
        return importlib.import_module(name).Heir

    yield heir
    for name in [name for name in sys.modules if name.startswith("of_their_year_")]:
        del sys.modules[name]


def test_a_class_without_a_constructor_has_that_of_its_base_in_another_file(heir: Any) -> None:
    made = heir(_HEIR)
    assert not hasattr(made(width=32), "heads")  # transformers 5 makes it a constructor of its own
    said = inherit_constructors(made)
    assert said == [f"{name} has the constructor of its base" for name in ("Heir", "Between")]
    assert (made(width=32).heads, made().width, made(own=3).own) == (2, 64, 3)
    text = plain_config_class(made)
    for _ in range(5):
        values = {"width": 16 * random.randint(1, 9), "own": random.random()}
        print(values)
        check_same_values(made, text, values)
        assert made.from_dict(values).heads == values["width"] // 16


def test_a_class_that_declares_its_fields_keeps_the_constructor_made_of_them(heir: Any) -> None:
    made = heir(_FIELDS)
    assert inherit_constructors(made) == []
    assert made().width == 3
    both = heir(_HEIR + "    width: int = 5\n")
    assert inherit_constructors(both) == ["Between has the constructor of its base"]
    assert both().width == 5


def _of_llama(heir: Any, imports: str) -> tuple[Any, list[str]]:
    made = heir(f"{_HEIR.split('class Between')[0]}{imports}\n\n\nclass Heir(Common):\n    pass\n")
    inherit_constructors(made)
    package = "of_their_year_own"
    sys.modules[f"{package}.modeling"] = sys.modules[made.__module__]
    return made, [*lend_fields(made, made(rms_norm_eps=0.25), package)]


def test_fields_of_later_years_that_code_of_transformers_reads_have_its_defaults(heir: Any) -> None:
    made, said = _of_llama(heir, "from transformers import LlamaForCausalLM")
    assert "Heir has no mlp_bias: False, the default of LlamaConfig" in said
    assert made().mlp_bias is False
    assert made(mlp_bias=True).mlp_bias is True
    assert not any(field in line for line in said for field in (" rms_norm_eps:", " width:"))
    for values in ({"width": 48}, {"width": 16, "mlp_bias": True}):
        check_same_values(made, plain_config_class(made), values)
    text = plain_config_class(made)
    assert "mlp_bias = False" in text


@pytest.mark.parametrize(
    "imports",
    [
        "from transformers.models.llama.modeling_llama import LlamaRMSNorm",
        "from transformers import LlamaForCausalLM\n\nDEFAULTS = dict(mlp_bias=True)",
    ],
)
def test_fields_that_nothing_of_transformers_reads_or_that_are_the_codes_own_stay_away(
    heir: Any, imports: str
) -> None:
    made, said = _of_llama(heir, imports)
    assert not any("mlp_bias" in line for line in said)
    assert not hasattr(made(), "mlp_bias")


_MAKES_ONE = """
from transformers import LlamaConfig, MistralConfig, PretrainedConfig


class Heir(PretrainedConfig):
    pass


def inner(values):
    return LlamaConfig.from_dict(values)


def other(config):
    return isinstance(config, MistralConfig)
"""


def test_configs_of_transformers_that_code_makes_read_as_of_its_year(heir: Any) -> None:
    module = sys.modules[heir(_MAKES_ONE).__module__]
    package = f"{module.__name__}_package"
    sys.modules[f"{package}.modeling"] = module
    theta = float(random.randint(2, 9) * 1000)
    values = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": theta}
    assert not hasattr(module.inner(values), "rope_theta")
    assert list(read_made_configs(package)) == [
        "modeling makes a LlamaConfig, which reads as of its year"
    ]
    made = module.inner(values)
    assert (made.rope_theta, made.rope_scaling, made.model_type) == (theta, None, "llama")
    assert isinstance(made, LlamaConfig)
    scaled = module.inner(values | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (scaled.rope_scaling["type"], scaled.rope_scaling["factor"]) == ("linear", 2.0)
    assert not hasattr(LlamaConfig(**values), "rope_theta")  # transformers' stays as it is
    assert module.MistralConfig is MistralConfig


_COUNTS = """
from transformers import PretrainedConfig


class Heir(PretrainedConfig):
    model_type = "heir"

    def __init__(
        self, hidden_size=64, num_attention_heads=4, max_position_embeddings=512, original_max_position_embeddings=128,
        rope_theta=10000.0, rope_scaling=None, **kwargs,
    ):
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.original_max_position_embeddings = original_max_position_embeddings
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self._adjust()
        self._check()
        super().__init__(**kwargs)

    def _adjust(self):
        if self.rope_scaling is None:
            return
        if self.rope_scaling.get("type", None) in ["su", "yarn"]:
            self.rope_scaling["type"] = "longrope"

    def _check(self):
        if self.rope_scaling is None:
            return
        if not isinstance(self.rope_scaling, dict) or len(self.rope_scaling) != 3:
            raise ValueError(f"three fields, got {{self.rope_scaling}}")
        if self.rope_scaling.get("type", None) not in ["longrope"]:
            raise ValueError("longrope")
"""


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_what_lies_beside_a_scaling_is_not_counted_as_one_of_its_fields(
    heir: Any, kind: str
) -> None:
    made = heir(_COUNTS)
    made.rope_scaling = OLD_ROPE_SCALING
    factors = [random.uniform(1, 4) for _ in range(8)]
    print(factors)
    beside = {"original_max_position_embeddings": 16 * random.randint(2, 9)}
    scaling = {"type": kind, "short_factor": factors, "long_factor": factors}
    first = made(rope_scaling=dict(scaling), **beside)
    for config in (first, made(rope_scaling=first.rope_scaling, **beside)):
        assert config.rope_scaling == scaling | {"type": "longrope"}
        assert config.rope_scaling["original_max_position_embeddings"] in beside.values()
        assert config.rope_scaling.get("rope_type") == config.rope_parameters["rope_type"]
        assert config.rope_parameters["rope_type"] == "longrope"
        assert config.rope_parameters.items() >= beside.items()
    check_same_values(made, plain_config_class(made), {"rope_scaling": scaling, **beside})


def test_fields_of_a_scaling_that_lie_in_it_are_counted(heir: Any) -> None:
    made = heir(_FIELDS + "    max_position_embeddings: int = 512\n")
    made.rope_scaling = OLD_ROPE_SCALING
    own = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    config = made(rope_theta=1e4, rope_scaling=dict(own))
    assert config.rope_scaling == own
