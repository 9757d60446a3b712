"""What comes from elsewhere is bounded before it is read, parsed, built or allocated: one line each."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onboard import hub
from onboard.analysis.repository_source import survey_code
from onboard.analysis.spec import ModelSpec
from onboard.config import RuntimeConfig, with_settings
from onboard.errors import OnboardError, UsageError
from onboard.graph.weight_load.safetensors_folder import Checkpoint
from onboard.registry import load_entries, models_path, parse_entries
from onboard.registry_text import insert_entry
from onboard.untrusted import bounds
from onboard.untrusted.yaml_text import load_yaml
from onboard.workflow.files import FileWriter

LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2}
SECONDS = 20
"""What refusing takes at the most, on a machine that does much else; nothing here needs one."""


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """Fail, not hang: a FIFO has no writer, a device no end."""

    def late(*_: object) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "bytes": ({"x": "y" * 2_000_000}, "at most 1,048,576"),
    "values": ({"x": [1] * 60_000}, "at most 50,000"),
    "depth": ({"x": nested(100)}, "at most 64"),
    "layers": ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers 2,147,483,647; at most 1,024"),
    "n_layer": ({"n_layer": 1025}, "n_layer 1,025"),
    "depths": ({"depths": [2, 100_000]}, "depths 100,000"),
    "inside": ({"text_config": {"num_hidden_layers": 5000}}, "num_hidden_layers 5,000"),
    "experts": ({"num_local_experts": 10**6}, "num_local_experts 1,000,000"),
    "width": ({"hidden_size": 10**9}, "hidden_size 1,000,000,000"),
    "length": ({"max_position_embeddings": 10**12}, "max_position_embeddings 1,000,000,000,000"),
    "negative": ({"num_hidden_layers": -3}, "num_hidden_layers -3"),
    "negative inside": ({"text_config": {"vocab_size": -1}}, "vocab_size -1"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings 0: no text has a"),
    "bits": ({"rope_theta": 2**70}, "a number of 71 bits"),
    "surrogate": ({"x": "\ud800"}, "no Unicode text"),
    "name": ({"model_type": "x" * 10_000}, "is not a name"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_beyond_a_bound_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    changes, reason = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    with pytest.raises(OnboardError, match=re.escape(reason)) as caught:
        hub.read_config(tmp_path)
    assert len(str(caught.value)) < 500


def test_configs_of_today_are_far_within_the_bounds() -> None:
    large = {
        "model_type": "x",
        "num_hidden_layers": 126,
        "vocab_size": 262_208,
        "n_routed_experts": 512,
        "intermediate_size": 53_248,
        "max_position_embeddings": 10_485_760,
        "rope_theta": 1e11,
        "layer_types": ["full_attention"] * 126,
        "no_rope_layers": [1] * 126,
        "eos_token_id": [1, 2, None],
    }
    bounds.check_config(large, "config.json")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("place", [fifo, device])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "modeling_x.py", "a.safetensors"]
)
def test_nothing_but_a_regular_file_is_opened(
    place: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).unlink(missing_ok=True)
    place(tmp_path / name)
    with pytest.raises(OnboardError, match="not a regular file"):
        hub.read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("generation_config.json", bounds.CONFIG_BYTES),
        ("model.safetensors.index.json", bounds.INDEX_BYTES),
        ("modeling_x.py", bounds.CODE_BYTES),
        ("chat_template.jinja", bounds.TEXT_BYTES),
        ("tokenizer.json", bounds.VOCABULARY_BYTES),
        ("tokenizer_config.json", bounds.VOCABULARY_BYTES),
    ],
)
def test_files_that_libraries_open_have_a_bound(
    name: str, bound: bounds.Bound, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for size in (bound.most, bound.most + 1):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)  # which takes no room
        if size == bound.most:
            hub.read_config(tmp_path)
    with pytest.raises(OnboardError, match=f"{name} has {bound.most + 1:,} bytes"):
        hub.read_config(tmp_path)


def test_a_folder_of_endless_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "FILES", bounds.Bound(3, "files", "this test"))
    for name in ("config.json", "a", "b", "c", "d"):
        (tmp_path / name).write_text(json.dumps(LLAMA))
    with pytest.raises(OnboardError, match="4 files; at most 3"):
        hub.read_config(tmp_path)


def test_what_phases_leave_is_read_within_bounds(tmp_path: Path) -> None:
    with (tmp_path / "state.json").open("wb") as file:
        file.truncate(bounds.ARTIFACT_BYTES.most + 1)
    with pytest.raises(OnboardError, match="at most 67,108,864 are taken"):
        FileWriter().read(tmp_path / "state.json")


def test_every_bound_is_asked_for() -> None:
    names = [name for name, value in vars(bounds).items() if isinstance(value, bounds.Bound)]
    texts = [path.read_text() for path in Path(bounds.__file__).parents[1].rglob("*.py")]
    asking = "\n".join(text for text in texts if "untrusted" in text or "_KIB" in text)
    used = set(re.findall(r"\b[A-Z_]{4,}\b(?! = Bound)", asking))
    assert set(names) <= used


BOMB = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
YAML = {
    "aliases": (BOMB, "at most 400,000"),
    "merges": (MERGES, "at most 400,000"),
    "itself": ("a: &a [*a]", "stands for itself"),
    "brackets": ("[" * 400, "65 levels"),
    "dashes": ("- " * 400, "65 levels"),
    "number": ("a: 0x" + "f" * 100_000, "400000 bits"),
    "tag": ("!!python/object/apply:os.system [id]", "not valid YAML"),
    "tagged": ("!!int []", "not valid YAML"),
    "bytes": ("a: " + "x" * 5_000_000, "at most 4,194,304"),
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_is_read_within_bounds(name: str) -> None:
    text, reason = YAML[name]
    with pytest.raises(OnboardError, match=reason):
        load_yaml(text, "x.yaml")
    with pytest.raises(OnboardError, match=reason):
        parse_entries(text)
    with pytest.raises(OnboardError, match=reason):
        ModelSpec.from_yaml(text)


def test_aliases_are_read_where_they_are_few() -> None:
    text = "a: &a {x: 1}\nb: *a\nc:\n  <<: *a\n  y: 2\n"
    assert load_yaml(text, "x") == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


@pytest.mark.parametrize("text", ["null", "3", "- a", "x"])
def test_a_registry_that_is_no_mapping_is_left_as_it_is(text: str) -> None:
    entry = parse_entries("models: [{name: a, config_id: a, yaml_extra: []}]")[0]
    with pytest.raises(OnboardError, match="mapping"):
        insert_entry(text, entry)


def test_a_registry_leads_nowhere_outside(tmp_path: Path) -> None:
    models_path(tmp_path).parent.mkdir()
    models_path(tmp_path).write_text(
        "models: [{name: a, config_id: ../../../victim, yaml_extra: []}]\n"
    )
    with pytest.raises(OnboardError, match="not the name of a file in configs/"):
        load_entries(tmp_path)


def code(folder: Path, text: str) -> dict[str, Any]:
    (folder / "c.py").write_text(text)
    return {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "c.M"}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\n" * 600_000, "1,200,000 bytes"),
        ("x = " + "-" * 200_000 + "1", "is not Python"),
        ("x = " + "(" * 10_000, "is not Python"),
        ("\0", "is not Python"),
    ],
)
def test_code_is_looked_at_within_bounds(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(OnboardError, match=reason):
        survey_code(tmp_path, code(tmp_path, text))


def test_code_of_endless_files_is_not_followed(tmp_path: Path) -> None:
    for n in range(100):
        (tmp_path / f"f{n}.py").write_text(f"from .f{n + 1} import x\n")
    with pytest.raises(OnboardError, match="65 files of Python"):
        survey_code(tmp_path, code(tmp_path, "from .f0 import x\n"))


def header(folder: Path, text: bytes, length: int | None = None) -> None:
    size = len(text) if length is None else length
    with (folder / "model.safetensors").open("wb") as file:
        file.write(size.to_bytes(8, "little") + text)
        file.truncate(8 + size)


def test_a_header_is_read_within_bounds(tmp_path: Path) -> None:
    header(tmp_path, b"{", 60_000_000)
    with pytest.raises(OnboardError, match="60,000,000 bytes of header"):
        Checkpoint(tmp_path).names()
    tensor = {"dtype": "F32", "shape": [10**9] * 50_000, "data_offsets": [0, 0]}
    header(tmp_path, json.dumps({"x": tensor}).encode())
    with pytest.raises(OnboardError, match="50,000 dimensions"):
        Checkpoint(tmp_path).names()


def test_an_index_that_nests_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / hub.WEIGHTS_INDEX).write_text("[" * 100_000)
    for read in (hub.shard_names, lambda folder: Checkpoint(folder).names()):
        with pytest.raises(OnboardError, match="is not valid JSON"):
            read(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_size": 10**9},
        {"max_num_tokens": 10**12},
        {"max_seq_len": 10**12},
        {"world_size": 10**6},
        {"kv_cache_config": {"tokens_per_block": 10**9}},
        {"kv_cache_config": {"state_snapshots": 10**12}},
        {"kv_cache_config": {"max_tokens": 10**18}},
        {"cuda_graph_config": {"batch_sizes": [-1]}},
        {"cuda_graph_config": {"batch_sizes": [1] * 5000}},
    ],
)
def test_a_configuration_s_numbers_have_upper_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="less than|greater than|at most"):
        with_settings(RuntimeConfig(), settings)


def test_a_spec_s_version_and_module_are_looked_at(llama_spec: ModelSpec) -> None:
    text = llama_spec.to_yaml()
    assert ModelSpec.from_yaml(text) == llama_spec
    with pytest.raises(OnboardError, match="schema_version"):
        ModelSpec.from_yaml(text.replace("schema_version: 1", "schema_version: 99"))
    with pytest.raises(OnboardError, match="'os' is no module of transformers"):
        ModelSpec.from_yaml(re.sub(r"hf_module: .*", "hf_module: os", text))


def test_a_model_of_endless_modules_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    from onboard.hf.hf_model import build_reference
    from tests.support.checkpoints import TINY

    few = bounds.Bound(20, "modules", "this test")
    monkeypatch.setattr(bounds, "MODULES", few)
    build_reference(LlamaConfig(**TINY | {"num_hidden_layers": 1}))
    with pytest.raises(OnboardError, match="21 modules; at most 20"):
        build_reference(LlamaConfig(**TINY | {"num_hidden_layers": 9}))
