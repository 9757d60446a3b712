"""The page, from records as an onboarding leaves them."""

from __future__ import annotations

import ast
import json
import re
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from onboard.analysis.analyze import analyze
from onboard.cli import main
from onboard.cli.documents import MODELS
from onboard.content import CONTENT_ROOT
from onboard.explain import explain_page
from onboard.explain.explanation import explanation
from onboard.gpu_kinds import known_gpus, read_bandwidth
from onboard.workflow.phase import RunOptions
from onboard.workflow.phase_runner import open_run
from tests.support.markdown import live
from tests.support.phases import make_run

DEMO = CONTENT_ROOT / "onboard" / "assets" / "demo"
HOSTILE = "fuse_rmsnorm: <script>alert(1)</script> @octocat #1 `x` [a](b) https://x.org"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root in which the demo's records are, and a hostile fact among them."""
    folder = tmp_path_factory.mktemp("root")
    context = open_run(str(DEMO), folder, RunOptions())
    context.work_dir.mkdir(parents=True)
    values = json.loads((DEMO / "config.json").read_text())
    analyze(values, DEMO, model=str(DEMO), revision=None).save(context.artifact("spec.yaml"))
    run = make_run()
    run["runs"]["full"]["facts"].append(HOSTILE)
    run["runs"]["full"]["transforms"][1] |= {"nodes": [40, 33], "ops": {"torch_rmsnorm": 7}}
    run["runs"]["full"]["transforms"].append(
        run["runs"]["full"]["transforms"][0] | {"key": "fuse_rmsnorm", "num_matches": 0}
    )
    context.write_json("run.json", run)
    row = {"level": "block", "block": "model.layers.0.mlp", "device": "cpu", "error": 1.25e-7}
    row |= {"name": "t", "status": "passed", "tolerance": 1e-5, "message": ""}
    context.write_json("tests.json", {"tests": [row], "command": "", "output": ""})
    return folder


def _bench(root: Path, **fields: Any) -> Path:
    folder = open_run(str(DEMO), root, RunOptions()).work_dir / "bench"
    folder.mkdir(exist_ok=True)
    profile = {"step_us": 90.0, "busy_us": 80.0, "kernels": 1, "gaps": []}
    profile["totals"] = [{"name": "_rmsnorm_kernel", "calls": 11, "us": 22.0}]
    result = {"max_concurrency": 1, "input_len": 128, "fits": True, "decode_step_ms": 0.1}
    result |= {"floor": {"decode_step_ms": 0.05}, "profile": profile}
    hardware = {"device": "NVIDIA H100", "read_bandwidth": 3e12, "matmul_rate": 1.0}
    document = {
        "date": "20260101",
        "device_type": "cuda",
        "hardware": hardware,
        "results": [result],
    }
    (folder / "bench.json").write_text(json.dumps(document | fields))
    return folder / "bench.json"


def test_alike_layers_are_together_with_both_places_that_are_there(root: Path) -> None:
    document = explanation(str(DEMO), root, "H100", None)
    (kind,) = document["layers"]
    assert (kind["layers"], kind["count"]) == ("0-4", 5)
    parts = {part["name"]: part for part in kind["parts"]}
    assert parts["layer"]["class"] == "LlamaDecoderLayer"
    assert not any(part["class"] == "LlamaDecoderLayer" for part in document["outside"])
    assert parts["mlp"]["class"] == "LlamaMLP"
    assert (parts["mlp"]["error"], parts["mlp"]["limit"]) == (1.25e-7, 1e-5)
    text = (CONTENT_ROOT / document["model_file"]).read_text()
    transformers = find_spec("transformers")
    assert transformers is not None
    for part in [*kind["parts"], *document["outside"]]:
        path, line = part["theirs"].split(":")
        theirs = (Path(transformers.origin or "").parents[1] / path).read_text().splitlines()
        first = theirs[int(line) - 1]
        assert first.startswith(("@", f"class {part['class']}", f"def {part['class']}")), part
        if part["ours"]:
            first, last = part["ours"]
            (node,) = ast.parse("\n".join(text.splitlines()[first - 1 : last])).body
            assert isinstance(node, ast.ClassDef)
            assert node.name == part["class"]


def test_the_floor_is_bytes_by_bandwidth(root: Path) -> None:
    floor = explanation(str(DEMO), root, "H100", 256)["floor"]
    weights = (DEMO / "model.safetensors").stat().st_size
    assert weights - 20_000 < floor["weights_bytes"] < weights, "a tied head: all weights are read"
    assert floor["cache_bytes"] == 5 * 2 * 4 * 32 * 256 * 2  # layers, k and v, heads, size, tokens
    total = floor["weights_bytes"] + floor["cache_bytes"]
    assert floor["microseconds"] == pytest.approx(total / 3350e9 * 1e6)
    assert explanation(str(DEMO), root, None, 256)["floor"]["microseconds"] is None
    assert all(read_bandwidth(name) > 1e11 for name in known_gpus())


def test_without_a_profile_it_says_how_to_get_one_and_with_one_shows_it(root: Path) -> None:
    page = explain_page.markdown(explanation(str(DEMO), root, None, None), root)
    assert "No microseconds: no profile of a GPU was taken" in page
    assert "onboard bench " in page
    path = _bench(root)
    document = explanation(str(DEMO), root, None, None)
    assert document["profile"]["totals"][0]["us"] == 22.0
    assert document["floor"]["bandwidth"] == 3e12
    assert document["floor"]["basis"] == "measured by onboard bench"
    page = explain_page.markdown(document, root)
    assert "`_rmsnorm_kernel`: 11 calls, 22.0 µs" in page
    assert "No microseconds" not in page
    assert "a decode step takes 100.0 µs, at least 50.0 there (50%)" in page
    _bench(root, device_type="cpu")
    assert explanation(str(DEMO), root, None, None)["profile"] is None
    path.unlink()


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)


def test_nothing_of_a_record_is_live_on_the_page(root: Path) -> None:
    document = explanation(str(DEMO), root, None, None)
    page = explain_page.markdown(document, root)
    assert not live(page)
    assert "`pattern_matcher/match_rmsnorm`: 7 matches, nodes 40 -> 33, +0 bytes" in page
    assert "  - +7 `torch_rmsnorm`\n" in page
    assert re.search(r"^- fuse\\_rmsnorm: \\<script.*: `fuse_rmsnorm`$", page, re.MULTILINE)
    reader = _Tags()
    reader.feed(explain_page.html(document, root))
    assert {"script", "a", "img"}.isdisjoint(reader.tags)
    assert {"h1", "li", "style"} <= reader.tags


def test_the_command(root: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["explain", str(DEMO), "--root", str(root)]
    assert main.run(words) == 0
    assert "### Layers 0-4: `full_attention`" in capsys.readouterr().out
    assert main.run([*words, "--html", str(tmp_path / "e.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    MODELS["explain"].model_validate(found)
    assert "<h1>" in (tmp_path / "e.html").read_text()
    assert main.run([*words, "--gpu", "80GiB"]) == 2
    assert "how fast the memory of '80GiB' is read is not known" in capsys.readouterr().err
    assert main.run(["explain", str(DEMO), "--root", str(tmp_path)]) == 2
    assert "was not onboarded under" in capsys.readouterr().err
