"""A repository's config class, written anew: the same values, and nothing that a constructor should
not do.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from onboard.analysis.repository_classes import _Fixed
from onboard.analysis.tiny.tiny_config import arguments_of
from onboard.codegen.config_checks import check_same_values
from onboard.codegen.config_class import plain_config_class
from onboard.errors import OnboardError
from onboard.hf.config_field import values_of
from onboard.hf.old.own_configs import own_config_class
from onboard.plain_config import OldFields, PlainConfig, add_old_defaults

SOURCE = """
from transformers import PretrainedConfig
class ThisConfig(PretrainedConfig):
    model_type = "this"
    attribute_map = {{"num_hidden_layers": "n_layer"}}
    def __init__(self, size: int = 12, n_layer=3, heads=4, kv_heads=None, scale=-1.5, kinds=None, **kwargs):
        self.size, self.n_layer = size, n_layer
        self.kv_heads: int = heads if kv_heads is None else kv_heads
        self.head_dim = kwargs.pop("head_dim", size // heads)
        if kinds is None:
            kinds = ["full" if (i + 1) % 2 else "window" for i in range(n_layer)]
        elif len(kinds) != n_layer:
            raise ValueError("kinds")
        self.kinds = kinds
        self._check()
        {extra}
        super(ThisConfig, self).__init__(**kwargs)
    def _check(self):
        pass
    @property
    def whole(self):
        # What all layers have
        return self.size * self.n_layer
    @property
    def odd(self):
        print("this")
        return 1
"""

HELPERS = """

def rounded(number: int, to: int = 8) -> int:
    "The next multiple."
    if to <= 0:
        raise ValueError(to)
    if number % to == 0:
        return number
    above = to - number % to
    return number + above


def asked(path):
    return open(path).read()


def seventh(number):
    return [item for item in range(number)][7]


def again(number):
    return again(number - 1) if number else 0


LEAST = 4


def at_least(number):
    return max(number, LEAST)
"""

_NUMBERS = itertools.count()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(tmp_path)

    def make(
        extra: str, base: str = "PretrainedConfig", methods: str = ""
    ) -> type[PretrainedConfig]:
        source = SOURCE.format(extra=extra).replace("PretrainedConfig", base) + methods + HELPERS
        config_class: type[PretrainedConfig] = _imported(tmp_path, source).ThisConfig
        return config_class

    yield make
    for name in [name for name in sys.modules if name.startswith("this_configuration_")]:
        del sys.modules[name]


@pytest.fixture
def config_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda text: _imported(tmp_path, text).Made
    for name in [name for name in sys.modules if name.startswith("this_configuration_")]:
        del sys.modules[name]


def _imported(folder: Path, text: str) -> Any:
    name = f"this_configuration_{next(_NUMBERS)}"  # parsed sources are kept by name
    (folder / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_properties_that_compute_a_value_come_along(make: Any) -> None:
    config_class = make("pass")
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(plain_config_class(config_class), names)
    values = {"size": 8, "n_layer": 5}
    ours = names["ThisConfig"].from_dict(values)
    assert ours.whole == config_class(**values).whole == 40
    assert ours.odd == 1  # without what it says
    assert "print" not in plain_config_class(config_class)


@pytest.mark.parametrize(
    "values", [{}, {"size": 40, "n_layer": 5}, {"head_dim": 7, "kv_heads": 2, "other": [1]}]
)
def test_it_makes_the_same_values(make: Any, values: dict[str, Any]) -> None:
    original = make("self.scale = scale ** 2 if scale < 0 else float(scale)")
    namespace: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(plain_config_class(original), namespace)
    theirs, ours = original(**values), namespace["ThisConfig"](**values)
    assert ours.to_dict() == theirs.to_dict()
    assert ours.num_hidden_layers == theirs.num_hidden_layers


def _executed(text: str, base: type) -> Any:
    names: dict[str, Any] = {"OldFields": OldFields, base.__name__: base}
    exec(text, names)
    return names


def test_what_a_config_of_transformers_is_given_beside_is_kept(make: Any) -> None:
    original = make("pass", "LlamaConfig")
    assert original.__bases__ == (LlamaConfig,)
    ours = _executed(plain_config_class(original), LlamaConfig)["ThisConfig"]
    values = {"size": 8, "rope_theta": 5e5, "hidden_size": 64}
    made = ours.from_dict(values)
    assert made.to_dict() == original.from_dict(values).to_dict()
    assert (made.rope_theta, made.vocab_size) == (5e5, 32000)


def test_a_config_class_of_transformers_is_written_as_an_heir(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "its_repository", ModuleType("its_repository"))
    own = own_config_class(LlamaConfig, "llama_own_code", "its_repository")
    text = plain_config_class(own)
    made = _executed(text, LlamaConfig)["LlamaOwnCodeConfig"](rope_theta=2e4, more=[1])
    assert made.to_dict() == own(rope_theta=2e4, more=[1]).to_dict()
    assert (made.model_type, made.rope_theta, made.more) == ("llama_own_code", 2e4, [1])


FILLED_IN = """
    def _fill(self, width, factor=2):
        self.width = width * factor
        self._more(3)

    def _more(self, count):
        self.kinds = self.kinds[:count]

    def _logged(self):
        if self.n_layer < 0:
            raise ValueError(f"{self.size}")

    def _read(self):
        self.text = open("/etc/hostname").read()

    def _inside(self):
        kinds = self.kinds
        kinds[0] = "other"

    def _deep(self):
        if self.n_layer:
            self._read()

    def _changing(self, size):
        size += 1
        self.width = size

    @staticmethod
    def _spread(pairs):
        spread = []
        for pair in pairs:
            for _ in range(pair[1]):
                spread.extend(pair[0])
        return spread

    def _clashing(self, pairs):
        kinds = list(pairs)
        return kinds

    def _half(self, size):
        if size > 3:
            return 1
        return 2
"""


@pytest.mark.parametrize("call", ["self._fill(size)", "self._fill(factor=n_layer, width=size + 1)"])
def test_what_a_method_makes_of_its_arguments_is_written_out(make: Any, call: str) -> None:
    original = make(call, methods=FILLED_IN)
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(text := plain_config_class(original), names)
    values = {"size": 40, "n_layer": 5}
    assert names["ThisConfig"](**values).to_dict() == original(**values).to_dict()
    assert "_fill" not in text
    check_same_values(original, text, values)


def test_what_a_method_returns_is_computed_in_its_place(make: Any) -> None:
    original = make("self.all_kinds = self._spread([[['a', 'b'], n_layer]])", methods=FILLED_IN)
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(text := plain_config_class(original), names)
    assert names["ThisConfig"](n_layer=2).all_kinds == ["a", "b", "a", "b"]
    assert "_spread" not in text
    check_same_values(original, text, {"n_layer": 5})


def test_a_method_that_only_checks_is_left_out(make: Any) -> None:
    assert "_logged" not in plain_config_class(make("self._logged()", methods=FILLED_IN))


@pytest.mark.parametrize(
    "call",
    [
        *("self._read()", "self._fill(*[size])", "self._changing(size)"),
        *("self._no()", "self.a = self._clashing([1])"),
    ],
)
def test_a_method_that_does_more_is_refused(make: Any, call: str) -> None:
    with pytest.raises(OnboardError, match="cannot be written anew: line"):
        plain_config_class(make(call, methods=FILLED_IN))


EARLY = """
    def _early(self, factor):
        if self.kinds is None:
            return
        if self.n_layer > 4:
            self.scale = factor
            return
        if self.size == 12:
            if factor:
                self.kinds[0] = "first"
            return
        self.scale = 2 * factor
"""


@pytest.mark.parametrize("values", [{}, {"n_layer": 5}, {"size": 16}])
def test_a_method_may_end_early(make: Any, values: dict[str, Any]) -> None:
    original = make("self._early(3.0)", methods=EARLY)
    changed = original(**values)
    assert hasattr(changed, "scale") or changed.kinds[0] == "first"
    check_same_values(original, plain_config_class(original), values)


LOOP = """
        self.chosen, self.count = [], 0
        for index, kind in enumerate(self.kinds):
            assert isinstance(kind, str)
            if kind == "window" and any(n_layer > each for each in (2, 3)):
                self.chosen.append(index)
                self.count += index
        for kind in self.kinds:
            if kind == "none":
                raise ValueError("none")
"""


@pytest.mark.parametrize(("n_layer", "chosen"), [(2, []), (3, [1]), (5, [1, 3])])
def test_what_loops_gather_is_gathered(make: Any, n_layer: int, chosen: list[int]) -> None:
    original = make(LOOP.strip())
    text = plain_config_class(original)
    assert text.count("for ") == 3
    made = original(n_layer=n_layer)
    assert (made.chosen, made.count) == (chosen, sum(chosen))
    check_same_values(original, text, {"n_layer": n_layer})


def test_what_a_method_changes_inside_a_field_is_kept(make: Any) -> None:
    original = make("self._inside()", methods=FILLED_IN)
    check_same_values(original, plain_config_class(original), {"n_layer": 3})


@pytest.mark.parametrize(
    "method",
    [
        "@classmethod\n    def from_dict(cls, values):\n        return super().from_dict({**values, 'scale': 99})",
        "def __setattr__(self, key, value):\n        super().__setattr__(key, 2 if key == 'scale' else value)",
    ],
)
def test_values_that_nothing_written_makes_are_refused(make: Any, method: str) -> None:
    original = make("self.scale = scale", methods=f"    {method}\n")
    with pytest.raises(OnboardError, match=r"its scale is (99|2), and -1.5 of its constructor's"):
        check_same_values(original, plain_config_class(original), {"size": 12})


def test_other_bases_are_refused(make: Any) -> None:
    heir = type("Heir", (make("pass"), dict), {})
    with pytest.raises(OnboardError, match="other bases than one config class"):
        plain_config_class(heir)


HEIR = """import torch
from transformers import PretrainedConfig

class First(PretrainedConfig):
    model_type = "first"
    def __init__(self, num_hidden_layers=6, size=8, **kwargs):
        self.num_hidden_layers, self.size = num_hidden_layers, size
        super().__init__(**kwargs)

class Made(First):
    model_type = "made"
    def __init__(self, scale=2.0, **kwargs):
        super().__init__(**kwargs)
        self.scale = scale * self.size
        self.plain_layers = torch.arange(self.num_hidden_layers).tolist()[:-2]
"""


STEPS = """from transformers import PretrainedConfig

class Made(PretrainedConfig):
    def __init__(self, num_hidden_layers=6, period=3, **kwargs):
        self.num_hidden_layers, self.period = num_hidden_layers, period
        super().__init__(**kwargs)
    @property
    def kinds(self):
        kinds = ["plain"] + [
            "shared" if index % self.period == 1 else "plain"
            for index in range(self.num_hidden_layers - 1)
        ]
        return kinds
    @property
    def read(self):
        kept = open("/etc/hostname").read()
        return kept
"""


def test_properties_that_take_several_steps_come_along(config_class: Any) -> None:
    made, values = config_class(STEPS), {"num_hidden_layers": 5, "period": 2}
    check_same_values(made, text := plain_config_class(made), values)
    assert "hostname" not in text
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(text, names)
    assert names["Made"].from_dict(values).kinds == made.from_dict(values).kinds


def test_an_heir_of_a_class_of_its_own_is_written_behind_it(config_class: Any) -> None:
    made, values = config_class(HEIR), {"size": 12, "num_hidden_layers": 5, "scale": 0.5}
    check_same_values(made, text := plain_config_class(made), values)
    assert "class Made(First):" in text
    assert "torch" not in text
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(text, names)
    assert names["Made"].from_dict(values).plain_layers == [0, 1, 2]


@pytest.mark.parametrize("size", [12, 24, 29])
def test_helper_functions_that_compute_a_value_are_written_out(make: Any, size: int) -> None:
    original = make("self.inner = rounded(int(8 * size / 3), 16) + rounded(to=4, number=size)")
    text = plain_config_class(original)
    assert "rounded" not in text
    namespace: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(text, namespace)
    assert namespace["ThisConfig"](size=size).to_dict() == original(size=size).to_dict()


@pytest.mark.parametrize(
    "extra",
    [
        "self.x = asked('x')",
        "self.x = seventh(size)",
        "self.x = again(size)",
        "self.x = at_least(size)",
        "self.x = rounded(*[size])",
        "import os; self.x = os.listdir()",
        "self.x = open('/etc/passwd').read()",
        "self.x = ().__class__.__bases__",
        "self.x = eval('1')",
        "self.x = (lambda: 1)()",
        "self.x = getattr(self, '__class__')",
        "for i in open('/etc/passwd'): self.x = i",
        "while size: size -= 1",
        "with open('x') as f: self.x = 1",
        "[].append(print(1))",
    ],
)
def test_what_is_more_than_a_value_is_refused(make: Any, extra: str) -> None:
    with pytest.raises(OnboardError, match="ThisConfig cannot be written anew: line"):
        plain_config_class(make(extra))


@pytest.mark.parametrize(
    ("extra", "covered", "other"),
    [
        ("if isinstance(scale, list): self.scale = divmod(7, 2)", {"scale": 2.0}, {"scale": [1]}),
        ("self._deep()", {"n_layer": 0}, {"n_layer": 2}),
        ("self.a = self._half(size)", {"size": 2}, {"size": 8}),
    ],
)
def test_a_branch_that_cannot_be_written_refuses_the_configs_that_take_it(
    make: Any, extra: str, covered: dict[str, Any], other: dict[str, Any]
) -> None:
    config_class = make(extra, methods=FILLED_IN)
    text = plain_config_class(config_class)
    check_same_values(config_class, text, covered)
    with pytest.raises(OnboardError, match=r"cannot be written anew: line \d+"):
        check_same_values(config_class, text, other)


@pytest.mark.parametrize(
    "extra",
    [
        "self._attn_implementation = 'eager'",
        "self._attn_implementation = 'eager'; print('size', size)",
        "self.model_type = 'that'",
        "self.transformers_version = kwargs.pop('transformers_version', None)",
        "try: import no_such_kernels; self._attn_implementation = 'kernels'\n        except: pass",
    ],
)
def test_private_fields_that_nothing_reads_are_left_out(make: Any, extra: str) -> None:
    text = plain_config_class(make(extra))
    assert "_attn_implementation" not in text
    assert "self.model_type" not in text
    assert "self.transformers_version" not in text
    assert "self.n_layer" in text


def test_a_private_argument_is_a_field_of_the_model(config_class: Any) -> None:
    made = config_class(
        "from transformers import PretrainedConfig\n\n\n"
        "class Made(PretrainedConfig):\n"
        "    def __init__(self, _last=True, **kwargs):\n"
        "        self._last = _last\n"
        "        self._told = 'that'\n"
        "        super().__init__(**kwargs)\n"
    )
    text = plain_config_class(made)
    assert "self._last = _last" in text
    assert "_told" not in text


OF_ATTENTION = """
    @property
    def _attn_implementation(self):
        return self._attn_implementation_internal or "flash_attention_2"

    @_attn_implementation.setter
    def _attn_implementation(self, value):
        self._attn_implementation_internal = value
"""


def test_what_says_which_attention_is_taken_is_left_out(make: Any) -> None:
    extra = "self._attn_implementation_internal = kwargs.pop('attn_implementation', None)"
    text = plain_config_class(make(extra, methods=OF_ATTENTION))
    assert "_attn_implementation" not in text
    assert "self.n_layer" in text


def test_what_is_set_where_something_fails_is_kept(make: Any) -> None:
    text = plain_config_class(make("try: import no_such\n        except ImportError: self.x = 7"))
    assert "self.x = 7" in text
    with pytest.raises(OnboardError, match="cannot be written anew"):
        plain_config_class(make("try: self.x = 1\n        except ImportError: self.x = 7"))


@pytest.mark.parametrize("values", [{}, {"deep": 5}])
def test_what_the_base_is_told_unless_it_is_given_is_kept(
    make: Any, values: dict[str, Any]
) -> None:
    original = make("kwargs.setdefault('deep', size + 1)")
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(plain_config_class(original), names)
    ours = names["ThisConfig"].from_dict({"size": 8, **values})
    assert ours.deep == original.from_dict({"size": 8, **values}).deep == values.get("deep", 9)


def test_a_default_of_the_module_is_written_out_and_items_go(make: Any) -> None:
    original = make("if 'name' in kwargs:\n            del kwargs['name']")
    source = sys.modules[original.__module__].__file__
    assert source is not None
    path = Path(source).with_name(f"{Path(source).stem}_2.py")
    text = Path(source).read_text().replace("kinds=None", "kinds=None, more=MORE")
    text = text.replace("self.kinds = kinds", "self.kinds, self.more = kinds, more")
    path.write_text(text.replace("class This", "MORE: dict = {'a': None, 'b': [1, 2]}\nclass This"))
    importlib.invalidate_caches()
    config_class = importlib.import_module(path.stem).ThisConfig
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(plain_config_class(config_class), names)
    ours = names["ThisConfig"].from_dict({"size": 8, "name": "x"})
    assert ours.more == {"a": None, "b": [1, 2]}
    assert not hasattr(ours, "name")


def test_what_a_method_fills_in_is_filled_in(make: Any) -> None:
    original = make("pass")
    source = sys.modules[original.__module__].__file__
    assert source is not None
    path = Path(source).with_name(f"{Path(source).stem}_3.py")
    text = Path(source).read_text().replace("kinds=None", "kinds=None, more=None")
    text = text.replace("self.kinds = kinds", "self.kinds, self.more = kinds, more or {}")
    checks = """
        self.more = self._added(self.more, MORE)
        if self.more["a"] not in (1, 5):
            raise ValueError(f"{self.more}")
        try:
            import json as parser
            del parser
        except ImportError:
            raise ValueError("json")
        if self.more["b"] == 2:
            self.more["size"] = self.size

    def _added(self, given, defaults):
        for key, value in defaults.items():
            if key not in given:
                given[key] = value
        return given
"""
    text = text.replace("    def _check(self):\n        pass\n", f"    def _check(self):{checks}")
    path.write_text(text.replace("class This", "MORE = {'a': 1, 'b': 2}\nclass This"))
    importlib.invalidate_caches()
    config_class = importlib.import_module(path.stem).ThisConfig
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(plain_config_class(config_class), names)
    for more in ({}, {"a": 5}, {"b": 3}):
        values = {"size": 8, "more": more}
        theirs, ours = config_class(**values), names["ThisConfig"].from_dict(values)
        assert ours.more == theirs.more


def test_configs_of_own_code_have_layers_of_their_own_kinds() -> None:
    fields = {"layer_types": ["delta", "swa"], "num_hidden_layers": 2}
    sizes = {"hidden_size": 10, "num_attention_heads": 3}

    def config_class(base: Any) -> Any:
        def init(self: Any, **kwargs: Any) -> None:
            for name in (*fields, *sizes):
                setattr(self, name, kwargs.pop(name))
            base.__init__(self, **kwargs)

        return type("Made", (base,), {"__init__": init, "model_type": "made"})

    Plain, Own = config_class(PretrainedConfig), config_class(PlainConfig)
    with pytest.raises(StrictDataclassClassValidationError):
        Plain(**fields, **sizes)
    with pytest.raises(StrictDataclassClassValidationError):
        Qwen3Config(**fields)
    add_old_defaults(Plain)
    for made in (Plain(**fields, **sizes), Own(**fields, **sizes)):
        assert made.layer_types == fields["layer_types"]
        assert made.num_attention_heads == sizes["num_attention_heads"]


@pytest.mark.parametrize(
    "text",
    [
        """class Made(LlamaConfig):
    model_type = "made"
""",
        """class Made(LlamaConfig):
    model_type = "made"

    def __init__(self, *args, extra=3, **kwargs):
        self.extra = extra
        self.layer_types = ["full_attention"] * kwargs.get("num_hidden_layers", 32)
        layer_type_validation(self.layer_types)
        super().__init__(*args, **kwargs)
""",
        """class Made(PretrainedConfig):
    model_type = "made"
    extra: int = 3
    heads: int | None = None
    hidden_size: int = 64

    def __post_init__(self, **kwargs):
        if self.heads is None:
            self.heads = self.hidden_size // self.extra
        super().__post_init__(**kwargs)
""",
        """@dataclass
class Made(PretrainedConfig):
    model_type = "made"
    extra: int = 3
    scale: float | None = None
    kinds: list | None = None
    hidden_size: int = 64

    def __init__(self, **kwargs):
        self.whole = self.hidden_size * self.extra
        if self.kinds is None:
            self.kinds = ["full"] * self.extra
        super().__init__(**kwargs)
""",
        """class Made(PretrainedConfig):
    model_type = "made"
    extra = 3
    heads = 4
    hidden_size = 64
    rates = (0.5, 2.0)

    def __init__(self, scale=0.5, **kwargs):
        self.scale = scale * self.rates[0]
        super().__init__(**kwargs)
""",
    ],
)
def test_constructors_that_are_inherited_declared_or_take_positions(
    text: str, config_class: Any
) -> None:
    head = """from dataclasses import dataclass
from transformers import LlamaConfig, PretrainedConfig
from transformers.configuration_utils import layer_type_validation
"""
    made = config_class(f"{head}\n\n{text}")
    values = {"hidden_size": 64, "vocab_size": 50, "own": 7}
    check_same_values(made, plain_config_class(made), values)
    check_same_values(made, plain_config_class(made), {**values, "extra": 5, "heads": 2})
    names: dict[str, Any] = {"PlainConfig": PlainConfig, "OldFields": OldFields}
    exec(plain_config_class(made), names | {"LlamaConfig": LlamaConfig, "names": names}, names)
    for key in ("extra", "hidden_size", "rates"):
        assert getattr(names["Made"](), key, None) == getattr(made(), key, None)


def test_positional_arguments_that_are_read_are_refused(config_class: Any) -> None:
    made = config_class(
        """from transformers import PretrainedConfig

class Made(PretrainedConfig):
    def __init__(self, *args, **kwargs):
        self.extra = len(args)
        super().__init__(*args, **kwargs)
"""
    )
    with pytest.raises(OnboardError, match="cannot be written anew"):
        plain_config_class(made)


PARTS = """from transformers import PretrainedConfig

class Inside(PretrainedConfig):
    def __init__(self, heads: int = 4, clip=None, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.clip = heads, clip
        for key in ["model_type"]:
            if key in kwargs:
                kwargs.pop(key)
        if kwargs:
            raise ValueError(kwargs)

class Made(PretrainedConfig):
    model_type = "made"
    def __init__(self, size=8, inside=None, **kwargs):
        self.size = size
        if inside is None:
            self.inside = Inside()
        elif isinstance(inside, dict):
            self.inside = Inside(**inside)
        else:
            self.inside = inside
        super().__init__(**kwargs)
"""


@pytest.mark.parametrize("inside", [None, {"heads": 6, "clip": 2.5, "model_type": ""}])
def test_configs_inside_a_config_are_written_before_it(
    inside: dict[str, Any] | None, config_class: Any
) -> None:
    made = config_class(PARTS)
    values = {"size": 12} | ({} if inside is None else {"inside": inside})
    check_same_values(made, text := plain_config_class(made), values)
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(text, names)
    ours = names["Made"].from_dict(values)
    assert isinstance(ours.inside, names["Inside"])
    assert ours.inside.heads == (4 if inside is None else 6)
    again = made.from_dict(values_of(made.from_dict(values)))
    assert again.inside.clip == ours.inside.clip


def test_what_the_base_is_told_is_not_taken_from_a_saved_config(config_class: Any) -> None:
    """The repository's class fails on its own values, which are those of the file behind a test."""
    text = """
from transformers import PretrainedConfig

class Made(PretrainedConfig):
    def __init__(self, size=4, eos_token_id=2, **kwargs):
        self.size = size
        super().__init__(eos_token_id=eos_token_id, pad_token_id=eos_token_id, **kwargs)
"""
    original = config_class(text)
    names: dict[str, Any] = {"PlainConfig": PlainConfig}
    exec(plain_config_class(original), names)
    made = names["Made"](size=8, eos_token_id=3)
    saved = names["Made"].from_dict(made.to_dict())
    assert (saved.size, saved.eos_token_id, saved.pad_token_id) == (8, 3, 3)
    assert "pad_token_id" not in arguments_of(original(size=8))
    assert arguments_of(original(size=8))["size"] == 8


def test_a_model_type_that_stays_whatever_a_constructor_assigns_is_no_difference(
    make: Any,
) -> None:
    values = {"model_type": "told", "size": 24}
    original = make("self.model_type = 'another'")
    original.model_type = _Fixed("told")
    text = plain_config_class(original)
    check_same_values(original, text, values)
    wrong = text.replace("size, n_layer", "size + 1, n_layer")
    with pytest.raises(OnboardError, match="its size is 24, and 25 of"):
        check_same_values(original, wrong, values)


ENUMERATED = """
from enum import Enum
from transformers import PretrainedConfig

class Kind(Enum):
    one = "first"
    many = "others"

class Count(Enum):
    none = 0
    some = 3

class Made(PretrainedConfig):
    model_type = "this"
    def __init__(self, kind="first", heads=4, count=0, **kwargs):
        self.kind = kind
        kind = Kind(kind)
        self.single = kind == Kind.one
        self.kv_heads = 1 if kind is Kind.one else heads
        self.name_of = Kind(self.kind).value
        if Count(count) == Count.some:
            self.kv_heads = Count.some.value
        super().__init__(**kwargs)
"""


def test_members_of_enumerations_are_their_values(config_class: Any) -> None:
    made = config_class(ENUMERATED)
    text = plain_config_class(made)
    assert "Kind" not in text
    assert " is 'first'" not in text
    for values in ({}, {"kind": "others"}, {"kind": "others", "heads": 7, "count": 3}):
        check_same_values(made, text, values)
