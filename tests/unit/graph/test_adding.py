"""docs/adding.md as it stands: each example is put where it says, under the name that it would have
there, and used.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from transformers import AutoConfig

import onboard.ops  # noqa: F401
from onboard.config import SettledConfig
from onboard.graph import transform as transforms
from onboard.graph.canonicalise import clean_up
from onboard.graph.context import TransformContext
from onboard.graph.export.to_graph import export_to_graph
from onboard.graph.factory import ModelFactory
from onboard.graph.transform import Stages
from onboard.ops import library
from onboard.workflow.phase import RunOptions
from onboard.workflow.phase_runner import PhaseRunner, load_phase, open_run
from onboard.workflow.zoo import load_zoo
from tests.support.document_examples import examples, write
from tests.support.graph.fusion import apply, context_for, exported

ROOT = Path(__file__).resolve().parents[3]
FILES = examples("adding.md")
Added = Callable[[str], ModuleType]


@pytest.fixture
def added(tmp_path: Path) -> Iterator[Added]:
    """Import an example under the name of the module that it would be; it is forgotten
    afterwards.
    """
    modules = []

    def add(path: str) -> ModuleType:
        assert not (ROOT / path).exists(), "an example takes no file's place"
        write(tmp_path, {path: FILES[path]})
        name = path.removesuffix(".py").replace("/", ".")
        name = f"onboard.content.{name}" if name.startswith("transforms.") else name
        spec = importlib.util.spec_from_file_location(name, tmp_path / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        modules.append(name)
        spec.loader.exec_module(module)
        return module

    yield add
    for name in modules:
        del sys.modules[name]
        transforms._TRANSFORMS.pop(name, None)
        for op in [op for op, source in library._SOURCES.items() if source.module == name]:
            del library._SOURCES[op]


def _registered(module: ModuleType, stage: Stages) -> Any:
    [(key, cls)] = transforms.registered(module.__name__)
    assert module.__name__ == f"onboard.content.transforms.{stage.value}.{key}"
    return cls(cls.config_class(stage=stage))


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)


class _Negations(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.neg(torch.neg(torch.neg(x))) + torch.neg(-(x * 2))


def test_a_transform_matches_and_rewrites(added: Added) -> None:
    own = _registered(
        added("transforms/post_load_fusion/drop_double_negation.py"), Stages.POST_LOAD_FUSION
    )
    gm = exported(_Negations(), 2, 3, 4, device="cpu")
    gm, info = own.apply(gm, context_for(Path()))
    assert info.num_matches == 2
    clean_up(gm)
    assert [str(node.target) for node in gm.graph.nodes if "neg" in str(node.target)] == [
        "aten.neg.default"
    ]
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(gm(x), -x + x * 2)


def test_an_op_is_registered_and_computes_its_formula(added: Added) -> None:
    """Its back end is compared in `interpreted_adding.py`, in Triton's interpreter."""
    added("onboard/ops/linear/softcap.py")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = (torch.randn(3, 7) * 40).to(dtype)
        found = torch.ops.onboard.torch_softcap(x, 20.0)
        assert found.dtype == dtype
        expected = 20.0 * (x.double() / 20.0).tanh()
        torch.testing.assert_close(
            found.double(), expected, rtol=torch.finfo(dtype).eps * 4, atol=1e-6
        )
        torch.library.opcheck(torch.ops.onboard.torch_softcap.default, (x, 20.0))


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return torch.ops.onboard.torch_leaky_sum(self.table(input_ids), 0.75)


def test_a_mechanism_is_cached(added: Added) -> None:
    """What the cached graph gives in chunks is what the formula gives of the whole text, in
    float64.
    """
    added("onboard/ops/recurrences/leaky_sum.py")
    own = _registered(added("transforms/cache_init/insert_cached_leaky_sum.py"), Stages.CACHE_INIT)
    settled = SettledConfig(
        max_seq_len=32, max_batch_size=3, max_num_tokens=32, kv_cache_config={"tokens_per_block": 4}
    )
    factory = ModelFactory(Path("unused"), root=None, dtype=torch.float32, model_kwargs={})
    context = TransformContext(factory, settled, torch.device("cpu"), torch.float32)
    model, ids = _Sum().eval().requires_grad_(False), torch.randint(40, (1, 14))
    gm: Any = export_to_graph(
        model, factory.example_inputs(), factory.dynamic_shapes(), context.device
    )
    gm, info = own.apply(gm, context)
    for key in ("initialize_cache", "resize_kv_cache"):
        apply(key, gm, context, shapes=False)
    gm.recompile()
    rows = []
    for start, end in ((0, 5), (5, 12), (12, 13), (13, 14)):
        pages = np.array([[group.allocator.take(4)] for group in context.cache.groups])
        span = np.array([start]), np.array([end - start])
        context.cache.info.set_batch(ids[0, start:end].numpy(), *span, pages, slots=np.array([2]))
        rows.append(context.cache.call(gm)[0])
    tokens, length = model.table(ids)[0].double(), torch.arange(14)
    weights = (0.75 ** (length[:, None] - length).double()).tril()
    assert info.num_matches == 1
    torch.testing.assert_close(torch.cat(rows).double(), weights @ tokens, rtol=1e-5, atol=1e-5)


def test_a_phase_runs_is_skipped_and_runs_again(added: Added, tmp_path: Path) -> None:
    added("onboard/workflow/phases/depth.py")
    model = tmp_path / "model"
    model.mkdir()

    def status(layers: int) -> str:
        (model / "config.json").write_text(
            json.dumps({"model_type": "llama", "num_hidden_layers": layers})
        )
        outcome = PhaseRunner([load_phase("depth")], Mock()).run(
            open_run(str(model), tmp_path, RunOptions())
        )
        assert outcome.exception is None
        assert json.loads((tmp_path / ".onboard/model/depth.json").read_text()) == {
            "layers": layers
        }
        return outcome.phases[0].status

    assert [status(2), status(2), status(3)] == ["done", "skipped", "done"]


def test_a_family_is_as_the_zoo_has_it() -> None:
    [(family, models)] = yaml.safe_load(FILES["registry/zoo.yaml"])["families"].items()
    assert load_zoo(ROOT)[family] == models
    for fields in models.values():
        config = AutoConfig.for_model(family, **fields)
        assert {name: getattr(config, name) for name in fields} == fields


def test_the_files_that_the_page_names_are_there() -> None:
    page = (ROOT / "docs" / "adding.md").read_text("utf-8")
    named = [
        name
        for name in re.findall(
            r"`((?:onboard|docs|tests|transforms|registry|templates)/[\w./]*)`", page
        )
    ]
    assert [name for name in named if name not in FILES and not (ROOT / name).exists()] == []
    assert len(named) > 15
