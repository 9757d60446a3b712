"""Where a model's layers lie, in lists that hold other modules, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import PretrainedConfig

from onboard.analysis.layer_modules import layer_kinds, with_modules
from tests.support.odd_code import run_apart, save_odd


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 9)


class _Model(nn.Module):
    def __init__(self, modules: list[nn.Module], kind: type[nn.Sequential] | type[nn.ModuleList]):
        super().__init__()
        self.config = PretrainedConfig(num_hidden_layers=2)
        self.mlp = nn.Sequential(nn.Linear(4, 4))
        self.trunk = kind(*modules) if kind is nn.Sequential else kind(modules)


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
@pytest.mark.parametrize(
    ("modules", "path"),
    [
        (lambda: [nn.Embedding(9, 4), _Layer(), _Layer(), _Head()], "trunk.1"),
        (lambda: [_Layer(), _Layer(), _Head()], "trunk.0"),
        (lambda: [_Layer(), _Layer()], "trunk.0"),
    ],
)
def test_layers_are_found_beside_other_modules(modules: Any, path: str, kind: Any) -> None:
    model = _Model(modules(), kind)
    recording: Any = SimpleNamespace(attention=[], modules={})
    (found,) = layer_kinds(model, model, recording, set(), [])
    assert found.path == path
    assert found.layers == [0, 1]


def test_a_larger_list_that_nothing_runs_has_no_layers() -> None:
    model = _Model([_Layer(), _Layer()], nn.ModuleList)
    model.heads = nn.ModuleList([_Layer(), _Layer(), _Layer()])
    recording: Any = SimpleNamespace(attention=[], modules={"trunk.0": [], "trunk.0.first": []})
    (found,) = layer_kinds(model, model, recording, set(), [])
    assert found.path == "trunk.0"


class _Mixed(nn.Module):
    """A layer with a mixer of one kind or the other, as hybrids have it, by the same name or not."""

    def __init__(self, attends: bool, named: bool) -> None:
        super().__init__()
        mixer = _Layer() if attends else _Head()
        if named:
            self.self_attn, self.scan = (mixer, None) if attends else (None, mixer)
        else:
            self.mixer = mixer
        self.norm = nn.LayerNorm(4)


def _of_mixed(named: bool, ran: set[int], **lists: Any) -> dict[str, list[int]]:
    """Return the kinds of four layers of which the second attends, where these ran."""
    model = _Model([_Mixed(index == 1, named) for index in range(4)], nn.ModuleList)
    model.config = PretrainedConfig(num_hidden_layers=4, attn_indices=[1], **lists)
    recording: Any = SimpleNamespace(
        attention=[], modules={f"trunk.{each}.norm": [] for each in ran}
    )
    kinds = layer_kinds(model, model, recording, set(), [])
    assert all(kind.path == f"trunk.{kind.layers[0]}" for kind in kinds)
    return {kind.name: kind.layers for kind in kinds}


def test_layers_that_hold_other_modules_are_of_another_kind_whatever_the_config_has() -> None:
    ran = {0, 1, 2, 3}
    assert _of_mixed(True, ran) == {"scan": [0, 2, 3], "self_attn": [1]}
    assert _of_mixed(False, ran) == {"_Head": [0, 2, 3], "_Layer": [1]}
    told = ["conv", "hybrid", "hybrid", "hybrid"]
    named = {"conv": [0], "hybrid_self_attn": [1], "hybrid_scan": [2, 3]}
    assert _of_mixed(True, ran, layer_types=told) == named
    told = ["conv", "hybrid", "conv", "conv"]
    assert _of_mixed(True, ran, layer_types=told) == {"conv": [0, 2, 3], "hybrid": [1]}


def test_layers_that_do_not_run_make_no_kind_of_their_own() -> None:
    assert _of_mixed(True, {0, 2, 3}) == {"full_attention": [0, 1, 2, 3]}


def test_layers_that_are_lists_of_modules_are_written_out_in_what_runs_them() -> None:
    rows = [nn.ModuleList([_Layer(), _Head()]) for _ in range(2)]
    blocks: Any = [SimpleNamespace(class_name="_Layer"), SimpleNamespace(class_name="_Head")]
    for layers, written_out in ((rows, True), ([_Layer(), _Layer()], False)):
        model = _Model([*layers], nn.ModuleList)
        ran = {"trunk.0.0": [], "trunk.0.1": []} if written_out else {"trunk.0": []}
        recording: Any = SimpleNamespace(attention=[], modules=ran)
        (kind,) = layer_kinds(model, model, recording, set(), [])
        found = with_modules(kind, model, recording, blocks)
        assert found.written_out is written_out
        assert found.modules == ({"0": "_Layer", "1": "_Head"} if written_out else {})


_KINDS = """
import json, sys
from pathlib import Path
from onboard.analysis.analyze import analyze
from onboard.analysis.repository import install
[folder] = map(Path, sys.argv[1:])
config = json.loads((folder / "config.json").read_text())
install(folder, config)
spec = analyze(config, folder, model=folder.name, trust_remote_code=True)
print("FOUND" + json.dumps({kind.name: kind.layers for kind in spec.layer_kinds}))
"""


def test_kinds_are_told_where_a_class_of_attention_is_chosen_by_the_implementation(
    tmp_path: Path,
) -> None:
    head = """
def attention_class(config):
    return Attention if config._attn_implementation == "eager" else FusedAttention
"""
    folder = save_odd(tmp_path / "chosen", head=head)
    code = folder / "modeling_odd.py"
    text = code.read_text().replace(
        "self.attn = Attention(config)",
        "self.attn = attention_class(config)(config) if index % 2 else Shifted(config)",
    )
    text = text.replace(
        "\nclass Block(",
        """
class FusedAttention(Attention):
    pass


class Shifted(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, position_ids):
        return self.inner(F.pad(x, (0, 0, 1, -1)))


class Block(""",
    )
    text = text.replace('base_model_prefix = "model"', "_supports_sdpa = True")
    code.write_text(text)
    assert run_apart(_KINDS, [folder]) == {"Shifted": [0, 2, 4], "Attention": [1, 3]}
