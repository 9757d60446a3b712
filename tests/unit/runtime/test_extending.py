"""docs/extending.md as it stands: its files are found, run, listed and part of the key; broken ones
are refused.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from onboard.cli import main
from onboard.config import RuntimeConfig
from onboard.errors import OnboardError, UsageError
from onboard.extensions import extensions_digest, find_extensions, load
from onboard.graph.assembly.assemble import load_pipeline, pipeline_for
from onboard.graph.context import TransformContext
from onboard.graph.graph_cache import key_parts
from onboard.graph.pipeline import Pipeline
from onboard.graph.transform import BaseTransform, Stages, TransformConfig, TransformInfo
from onboard.ops.library import declared
from onboard.runtime.build import make_context
from onboard.runtime.engine import Engine
from tests.support.document_examples import examples, write
from tests.support.runtime.tiny import Tiny

IDS = [5, 1, 40, 7, 7, 23, 9]
TRANSFORM = "transforms/post_load_fusion/soft_cap.py"
OP = "ops/exact_rmsnorm.py"
FILES = examples("extending.md")


def install(
    site: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], project: str
) -> None:
    """What pip leaves of a package: its files, and the entry points that its pyproject.toml
    names.
    """
    metadata = tomllib.loads(project)["project"]
    folder = f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in each.items())
        for group, each in metadata["entry-points"].items()
    )
    header = f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n"
    write(site, {**files, f"{folder}/entry_points.txt": points, f"{folder}/METADATA": header})
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def root_files() -> dict[str, str]:
    return {name: text for name, text in FILES.items() if name.startswith(("ops/", "transforms/"))}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, with the document's one."""
    files = {name: text for name, text in FILES.items() if name.startswith("onboard_temperature/")}
    install(tmp_path / "site", monkeypatch, files, FILES["pyproject.toml"])
    return tmp_path / "site"


def is_from_cache(engine: Engine) -> bool:
    return any(entry.from_cache for entry in engine.history)


def test_the_examples_compute_what_they_say(
    tiny: Callable[..., Tiny],
    root_files: dict[str, str],
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("llama")
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path / "cache"))
    write(model.root, root_files)
    settings = {"transforms": {"temperature": {"temperature": 0.5}}}
    first, second = model.engine(**settings), model.engine(**settings)
    expected = 20 * torch.tanh(model.logits(IDS).double() / 20) / 0.5
    assert (expected - model.logits(IDS)).abs().max() > 0.1
    for engine in (first, second):
        error = (
            engine.logits(IDS) - expected
        ).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error <= 1e-5
        calls = [str(node.target) for node in engine.gm.graph.nodes]
        assert (
            calls.count("onboard.exact_cached_attention.default")
            == model.hf.config.num_hidden_layers
        )
        assert (
            calls.count("onboard.exact_rmsnorm.default")
            == 2 * model.hf.config.num_hidden_layers + 1
        )
        assert calls.count("temperature.divide.default") == 1
        named = "\n".join(fact for fact in engine.facts if "no part of onboard" in fact)
        assert all(
            each in named
            for each in (TRANSFORM, "exact_norms.py", "onboard-temperature 1.0", "back end exact")
        )
    assert not is_from_cache(first)
    assert is_from_cache(second)
    context = make_context(
        model.checkpoint, RuntimeConfig(device="cpu", **settings), root=model.root
    )
    keys = [key_parts(context, pipeline_for(context))]
    # Another test of this process may have imported the package from its own site.
    installed = find_spec("onboard_temperature.ops")
    assert installed is not None
    assert installed.origin is not None
    for path in (model.root / TRANSFORM, Path(installed.origin)):
        path.write_text(path.read_text() + "\n# edited\n")
        keys.append(key_parts(context, pipeline_for(context)))
    assert len({json.dumps(key, sort_keys=True, default=str) for key in keys}) == 3


def test_an_ops_file_of_a_root_is_in_the_digest(tmp_path: Path, root_files: dict[str, str]) -> None:
    assert extensions_digest(tmp_path) == ""
    write(tmp_path, root_files)
    seen = {extensions_digest(tmp_path)}
    for name in root_files:
        (tmp_path / name).write_text(root_files[name] + "\n")
        seen.add(extensions_digest(tmp_path))
    assert len(seen) == 1 + len(root_files)


def test_a_file_runs_as_it_is_written(tmp_path: Path) -> None:
    write(tmp_path, {"ops/plain.py": "def plain(x: int): ...  # register_op\n"})
    (file,) = find_extensions(tmp_path)
    load(file)
    assert sys.modules[file.module].plain.__annotations__ == {"x": int}, (
        "not text, as under a __future__ of ours"
    )


def test_an_op_of_a_root_declares_what_shipped_ones_do(tmp_path: Path) -> None:
    text = (
        FILES[OP]
        .replace("exact_rmsnorm", "declared_rmsnorm")
        .replace("register_op()", "register_op(row_wise=True)")
    )
    write(tmp_path, {OP: text})
    (file,) = find_extensions(tmp_path)
    load(file)
    assert declared(torch.ops.onboard.declared_rmsnorm.default).row_wise


def order_of(root: Path, *keys: str, **overrides: dict[str, object]) -> list[str]:
    return [each.key for each in load_pipeline(overrides, root=root) if each.key in keys]


def test_a_new_transform_runs_where_the_roots_pipeline_has_it(
    tmp_path: Path, root_files: dict[str, str]
) -> None:
    write(tmp_path, root_files)
    shown = (
        "exact_norms",
        "fuse_rmsnorm",
        "gather_logits_before_lm_head",
        "soft_cap",
        "fuse_linears",
    )
    assert order_of(tmp_path, *shown) == list(shown)
    (tmp_path / "transforms/default.yaml").unlink()
    assert order_of(tmp_path, "soft_cap") == [], "nobody asks for it"
    assert order_of(
        tmp_path, "mlir_elementwise_fusion", "soft_cap", "insert_cached_attention", soft_cap={}
    ) == [
        "mlir_elementwise_fusion",
        "soft_cap",
        "insert_cached_attention",
    ]


def broken_by(change: Callable[[str], str]) -> dict[str, str]:
    return {TRANSFORM: change(FILES[TRANSFORM])}


FUNCTION = """from onboard.graph.transform import register_transform

@register_transform("soft_cap")
def soft_cap(gm, context): ...
"""

BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "syntax": (
        broken_by(lambda text: text.replace("class SoftCapConfig", "klass SoftCapConfig")),
        "SyntaxError",
    ),
    "import": (broken_by(lambda text: f"import no_such_module\n{text}"), "no_such_module"),
    "exit": (broken_by(lambda text: f"{text}\nraise SystemExit(0)"), "SystemExit"),
    "another key": (
        broken_by(lambda text: text.replace('transform("soft_cap")', 'transform("other")')),
        "'other'",
    ),
    "nothing registered": (
        broken_by(lambda text: text.replace("@register_transform", "# ")),
        "no transform",
    ),
    "no class": (
        {TRANSFORM: FUNCTION},
        "soft_cap is no BaseTransform",
    ),
    "no apply": (
        broken_by(lambda text: text.replace("def rewrite", "def use")),
        "`apply` or `rewrite`",
    ),
    "no stage": (
        {"transforms/fusion/soft_cap.py": FILES[TRANSFORM]},
        "'fusion'.*Did you mean 'post_load_fusion'",
    ),
    "a shipped key": (
        {"transforms/compile/fuse_moe.py": FILES[TRANSFORM].replace("soft_cap", "fuse_moe")},
        "shipped transform 'fuse_moe'",
    ),
    "two of a name": (
        {TRANSFORM: FILES[TRANSFORM], "transforms/visualize/soft_cap.py": FILES[TRANSFORM]},
        TRANSFORM,
    ),
    "a shipped op": (
        {"ops/mine.py": FILES[OP].replace("def exact_rmsnorm", "def torch_rmsnorm")},
        "'torch_rmsnorm'.*another name",
    ),
    "unknown in the pipeline": (
        {"transforms/default.yaml": "soft_cup: {}"},
        "default.yaml.*soft_cup",
    ),
    "no pipeline": ({"transforms/default.yaml": "[soft_cap]"}, "default.yaml.*list"),
    "no YAML": ({"transforms/default.yaml": "{"}, "default.yaml.*YAML"),
    "no fields": ({"transforms/default.yaml": "fuse_moe: 3"}, "default.yaml.*fuse_moe"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    files, message = BROKEN[name]
    write(tmp_path, files)
    place = "transforms/default.yaml" if "transforms/default.yaml" in files else list(files)[-1]
    with pytest.raises(UsageError, match=message) as caught:
        load_pipeline({}, root=tmp_path)
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import no_such_module", "no_such_module"),
        ("", "registers no transform"),
        (FILES[TRANSFORM], "no stage 'None'"),
        (
            FILES[TRANSFORM].replace('("soft_cap")', '("fuse_moe", stage="compile")'),
            "shipped transform 'fuse_moe'",
        ),
    ],
)
def test_a_broken_package_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    name = f"broken_{abs(hash(tmp_path))}"
    entry = f'[project.entry-points."onboard.transforms"]\nmine = "{name}"\n'
    project = f'[project]\nname = "{name}"\nversion = "2"\n{entry}'
    install(tmp_path, monkeypatch, {f"{name}.py": module}, project)
    with pytest.raises(UsageError, match=message) as caught:
        load_pipeline({})
    assert f"{name} 2 (onboard.transforms: mine)" in str(caught.value)


class _Given(BaseTransform[TransformConfig]):
    """Starts a pipeline with a graph that is there already."""

    key = "given"

    def apply(self, gm: nn.Module, context: TransformContext) -> tuple[nn.Module, TransformInfo]:
        traced = fx.symbolic_trace(nn.Identity())
        next(iter(traced.graph.nodes)).meta["val"] = torch.empty(7)
        return traced, TransformInfo(is_clean=True, has_valid_shapes=True)


def _capped(root: Path, **fields: object) -> nn.Module:
    """Run the root's `soft_cap` alone, on a graph that returns what it is given."""
    given = _Given(TransformConfig(stage=Stages.FACTORY, run_per_gm=False))
    own = [
        each for each in load_pipeline({"soft_cap": fields}, root=root) if each.key == "soft_cap"
    ]
    context = TransformContext(None, RuntimeConfig(), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    return Pipeline([given, *own]).run(context)


@pytest.mark.parametrize(
    ("body", "message"),
    [("raise KeyError('inside')", "KeyError: 'inside'"), ("return None", "NoneType")],
)
def test_a_transform_that_breaks_is_refused_with_its_name(
    tmp_path: Path, body: str, message: str
) -> None:
    write(
        tmp_path,
        {TRANSFORM: FILES[TRANSFORM].replace("output = gm", f"{body}\n        output = gm", 1)},
    )
    with pytest.raises(UsageError, match=message) as caught:
        _capped(tmp_path)
    assert TRANSFORM in str(caught.value)


def test_a_graph_computes_what_it_says_at_once(tmp_path: Path) -> None:
    """`onboard verify` runs it after each transform."""
    write(tmp_path, {TRANSFORM: FILES[TRANSFORM]})
    logits = torch.randn(7) * 5
    torch.testing.assert_close(_capped(tmp_path, cap=2.0)(logits), 2 * torch.tanh(logits / 2))


def test_an_op_that_mixes_tokens_is_refused(tiny: Callable[..., Tiny]) -> None:
    model = tiny("llama")
    op = (
        FILES[OP]
        .replace("exact_rmsnorm", "mixing_rmsnorm")
        .replace("weight.double())", "weight.double()).flip(1)")
    )
    transform = FILES["transforms/post_load_fusion/exact_norms.py"].replace(
        "exact_rmsnorm", "mixing_rmsnorm"
    )
    write(
        model.root, {"ops/mixing.py": op, "transforms/post_load_fusion/exact_norms.py": transform}
    )
    with pytest.raises(
        OnboardError, match="mixing_rmsnorm mixes the tokens|mixing_rmsnorm in .* mixes the tokens"
    ):
        model.engine(transforms={"exact_norms": {}, "fuse_rmsnorm": {"enabled": False}})


def test_doctor_lists_each_with_where_it_comes_from(
    tmp_path: Path,
    root_files: dict[str, str],
    site: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onboard.cli.commands.doctor._PACKAGES", ())
    left_alone = {"ops/deploy.py": "raise SystemExit('run by nobody')"}
    write(
        tmp_path, {**root_files, **left_alone, "transforms/compile/bad.py": "register_transform("}
    )
    assert main.run(["doctor", "--root", str(tmp_path)]) == 0
    found = dict(re.findall(r"^extension +(.*?): (.*)$", capsys.readouterr().out, re.MULTILINE))
    assert found[TRANSFORM] == "transform soft_cap (post_load_fusion)"
    assert found[OP] == "ops exact_rmsnorm"
    assert "broken" in found["transforms/compile/bad.py"]
    assert "left alone" in found["ops/deploy.py"]
    assert len(found) == len(root_files) - 1 + 2 + 2
    with pytest.raises(UsageError, match="bad.py"):
        load_pipeline(RuntimeConfig().transforms, root=tmp_path)
