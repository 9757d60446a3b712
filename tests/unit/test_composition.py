"""An entry runs with its configs, deep-merged in order; what the user says wins over all."""

from __future__ import annotations

from pathlib import Path

import pytest

from onboard import registry
from onboard.composition import compose, compose_config, layers, merge, origins, own, without_effect
from onboard.config import RuntimeConfig
from onboard.content import CONTENT_ROOT
from onboard.errors import OnboardError, UsageError
from onboard.registry import RegistryEntry, load_entries
from onboard.registry_text import insert_entry
from onboard.runtime.resolve import resolve_config

SHARED = ["dashboard_default.yaml", "world_size_1.yaml"]
STANDALONE = (CONTENT_ROOT / "registry" / "configs" / "dashboard_default.yaml").read_text()


def _root(
    tmp_path: Path, standalone: str = "", extra: list[str] | None = None, **fragments: str
) -> Path:
    """A root that has the entry `org/x`, whose standalone config repeats the defaults as generated
    ones do.
    """
    configs = tmp_path / "registry" / "configs"
    configs.mkdir(parents=True)
    for name, text in fragments.items():
        (configs / f"{name}.yaml").write_text(text)
    lines = [line for line in STANDALONE.splitlines() if line.split(":")[0] not in standalone]
    (configs / "x.yaml").write_text(
        "\n".join([*lines, "model: org/x", "transforms: {}", standalone, ""])
    )
    files = [*SHARED, *fragments, "x"] if extra is None else extra
    names = [name if name.endswith(".yaml") else f"{name}.yaml" for name in files]
    entry = RegistryEntry(name="org/x", config_id="x", yaml_extra=names)
    registry.models_path(tmp_path).write_text(insert_entry(registry.HEADER, entry))
    return tmp_path


def test_a_fragment_changes_a_run_wherever_it_stands(tmp_path: Path) -> None:
    small = "max_seq_len: 64\nkv_cache_config: {max_tokens: 128}\n"
    for number, extra in enumerate(
        [[*SHARED, "small", "x"], [*SHARED, "x", "small"], [*SHARED, "small"]]
    ):
        root = _root(tmp_path / str(number), extra=extra, small=small)
        found = resolve_config("org/x", root)
        assert (found.model, found.max_seq_len, found.kv_cache_config.max_tokens) == (
            "org/x",
            64,
            128,
        )
        assert found.kv_cache_config.tokens_per_block == 32
        assert resolve_config("org/other", root).max_seq_len is None, (
            "another model has no part in it"
        )


def test_files_win_in_order_and_what_the_model_has_of_its_own_is_last(tmp_path: Path) -> None:
    first, second = (
        "max_seq_len: 64\nmax_batch_size: 3\n",
        "max_batch_size: 5\ntransforms: {fuse_gemms: {enabled: false}}\n",
    )
    root = _root(tmp_path, "max_seq_len: 96", first=first, second=second)
    entry = load_entries(root)[0]
    found = compose(entry, root)
    assert (found.max_seq_len, found.max_batch_size, found.max_num_tokens) == (96, 5, None)
    assert found.transforms == {"fuse_gemms": {"enabled": False}}
    where = origins(layers(entry, root))
    assert where["max_seq_len"] == "x.yaml"
    assert where["max_batch_size"] == where["transforms.fuse_gemms.enabled"] == "second.yaml"
    assert where["max_num_tokens"] == "dashboard_default.yaml"
    assert without_effect(layers(entry, root)) == ["first.yaml"]


def test_the_roots_own_shared_files_come_first(tmp_path: Path) -> None:
    root = _root(tmp_path, dashboard_default="max_batch_size: 2\n")
    assert resolve_config("org/x", root).max_batch_size == 2
    assert compose_config(SHARED, root).max_batch_size == 2


def test_the_user_wins_over_all(tmp_path: Path) -> None:
    fragment = "max_seq_len: 64\ndevice: cpu\ndtype: bfloat16\ncompile_backend: torch-simple\n"
    root = _root(tmp_path, "max_batch_size: 3", fragment=fragment)
    said = {
        "max_seq_len": 512,
        "max_batch_size": 8,
        "dtype": "float32",
        "device": "auto",
        "world_size": 1,
    }
    found = resolve_config("org/x", root, None, said)
    assert (found.max_seq_len, found.max_batch_size, found.dtype, found.device) == (
        512,
        8,
        "float32",
        "cpu",
    )
    assert resolve_config("org/x", root, {"max_seq_len": 7}).compile_backend == "auto", (
        "a given config is used alone"
    )
    alone = resolve_config("org/x", root, root / "registry" / "configs" / "x.yaml")
    assert (alone.max_seq_len, alone.max_batch_size) == (None, 3)


def test_a_shipped_entry_is_known_under_every_root(tmp_path: Path) -> None:
    shipped = load_entries(CONTENT_ROOT)[0]
    found = resolve_config(shipped.name, tmp_path)
    assert found == compose(shipped, CONTENT_ROOT)
    own_root = _root(tmp_path, small="max_seq_len: 64\n")
    text = registry.models_path(own_root).read_text()
    mine = RegistryEntry(name=shipped.name, config_id="mine", yaml_extra=[*SHARED, "small.yaml"])
    (own_root / "registry" / "configs" / "mine.yaml").write_text(f"model: {shipped.name}\n")
    registry.models_path(own_root).write_text(insert_entry(text, mine))
    assert resolve_config(shipped.name, own_root).max_seq_len == 64, (
        "the root's own entry comes first"
    )


@pytest.mark.parametrize("config", ["x", "fragment"])
def test_a_link_that_leads_out_of_the_root_is_refused(tmp_path: Path, config: str) -> None:
    root = _root(tmp_path / "root", fragment="max_seq_len: 64\n")
    path = root / "registry" / "configs" / f"{config}.yaml"
    outside = tmp_path / "outside.yaml"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(OnboardError, match="leads out of"):
        resolve_config("org/x", root)
    path.unlink()
    outside.rename(root / "inside.yaml")
    path.symlink_to(root / "inside.yaml")
    assert resolve_config("org/x", root).max_seq_len == 64


def test_what_is_no_configuration_is_one_line_that_names_the_entry(tmp_path: Path) -> None:
    for number, text in enumerate(
        ["max_seq_length: 3\n", "max_seq_len: soon\n", "- a\n", "max_seq_len: [\n"]
    ):
        root = _root(tmp_path / str(number), fragment=text)
        with pytest.raises(OnboardError, match=r"org/x|fragment\.yaml") as error:
            resolve_config("org/x", root)
        assert "\n" not in str(error.value)
    with pytest.raises(OnboardError, match=r"registry config gone\.yaml does not exist"):
        resolve_config("org/x", _root(tmp_path / "gone", extra=[*SHARED, "gone"]))
    with pytest.raises(UsageError, match="max_seq_len"):
        resolve_config("org/x", _root(tmp_path / "near", fragment="max_seq_length: 3\n"))


def test_what_counts_as_a_files_own() -> None:
    values = {
        "dtype": "auto",
        "max_seq_len": 96,
        "kv_cache_config": {"tokens_per_block": 32, "max_tokens": 9},
    }
    expected = {"max_seq_len": 96, "kv_cache_config": {"max_tokens": 9}}
    assert own(values | {"transforms": {}, "model_kwargs": {}}) == expected
    assert merge([]) == {}


def test_every_shipped_fragment_and_entry_is_valid_and_names_one_world_size(
    tmp_path: Path,
) -> None:
    assert own(compose_config(SHARED, tmp_path).model_dump(mode="json")) == {}, (
        "standalone configs repeat defaults"
    )
    for path in (CONTENT_ROOT / "registry" / "configs").glob("*.yaml"):
        assert isinstance(
            compose_config(["dashboard_default.yaml", path.name], tmp_path), RuntimeConfig
        )
    for entry in load_entries(CONTENT_ROOT):
        found = compose(entry, CONTENT_ROOT).world_size
        assert f"world_size_{found}.yaml" in entry.yaml_extra
        path = registry.config_path(CONTENT_ROOT, entry.config_id)
        assert registry.load_standalone(path).world_size == found
