from __future__ import annotations

import difflib
import multiprocessing
from pathlib import Path

import pytest
from pydantic import ValidationError

from onboard import registry
from onboard.errors import OnboardError, UsageError
from onboard.registry import RegistryEntry, parse_entries
from onboard.registry_text import insert_entry, set_fields

COMMENTED = """\
# The list.   Spacing is mine.
version:   "1.0"
models:   # sorted by taste

# --- first
- name:  'org/One'   # quoted
  config_id: one
  yaml_extra: [dashboard_default.yaml,
               world_size_1.yaml]

#  - name: org/Off
#    note: out of memory
- name: org/Two
  config_id: two
  yaml_extra:
  - dashboard_default.yaml   # first

# --- end of the list
notes: >
  folded

  text
"""


def _entry(name: str = "org/New-7B") -> RegistryEntry:
    return RegistryEntry(
        name=name, config_id="new-7b", yaml_extra=["dashboard_default.yaml", "new-7b.yaml"]
    )


@pytest.mark.parametrize(
    "text",
    [COMMENTED, registry.HEADER, "models:\n  - {name: a, config_id: b, yaml_extra: [c.yaml]}", ""],
    ids=["commented", "header", "no final newline", "empty"],
)
def test_an_entry_only_adds_lines(text: str) -> None:
    new = insert_entry(text, _entry())
    changes = [
        line
        for line in difflib.ndiff(text.splitlines(), new.splitlines())
        if not line.startswith("  ")
    ]
    assert all(line.startswith("+ ") for line in changes), changes
    assert parse_entries(new) == [*parse_entries(text), _entry()]
    assert insert_entry(new, _entry()) == new


@pytest.mark.parametrize(
    "text", [COMMENTED, "models:\n  - {name: org/Two, config_id: b, yaml_extra: [c.yaml]}"]
)
def test_fields_of_one_entry_change_and_nothing_else_moves(text: str) -> None:
    first = set_fields(text, "org/Two", {"status": "pending"})
    new = set_fields(
        first,
        "org/Two",
        {"status": "passed", "tested": "2026-01-02", "model_file": f"sha256:{'0' * 16}"},
    )
    old, found = ({entry.name: entry for entry in parse_entries(each)} for each in (text, new))
    assert (found["org/Two"].status, str(found["org/Two"].tested)) == ("passed", "2026-01-02")
    assert found["org/Two"].model_file == f"sha256:{'0' * 16}"
    assert {name: entry for name, entry in found.items() if name != "org/Two"} == {
        name: entry for name, entry in old.items() if name != "org/Two"
    }
    removed = [
        line for line in difflib.ndiff(text.splitlines(), new.splitlines()) if line.startswith("- ")
    ]
    assert len(removed) == text.count("{name"), "of a block no line changes, of braces the one"


def test_an_empty_list_in_brackets_is_opened() -> None:
    assert parse_entries(insert_entry("models: []  # none yet\nversion: '1'\n", _entry())) == [
        _entry()
    ]


def test_an_entry_that_a_person_changed_stays() -> None:
    text = insert_entry(registry.HEADER, _entry()).replace("new-7b.yaml", "mine.yaml")
    assert insert_entry(text, _entry()) == text


@pytest.mark.parametrize("name", ["yes", "1.0", "a: b", "#x", "org/a\nmodels: []", "'"])
def test_a_hostile_name_stays_a_string(name: str) -> None:
    assert [e.name for e in parse_entries(insert_entry(COMMENTED, _entry(name)))] == [
        "org/One",
        "org/Two",
        name,
    ]


ONE = "name: a, config_id: b"
BROKEN = [
    *(
        "models: {}\n",
        "models: [\n",
        "- a\n",
        "models:\n- 3\n",
        "models:\n- name: x\n",
        "models: yes\n",
        "3\n",
    ),
    *(
        "models:\n- [a, b]\n",
        "models: &m [*m]\n",
        "models:\n- {name: 3, config_id: b, yaml_extra: []}\n",
        "? {a: b}\n",
    ),
    *(
        f"models:\n- {{{ONE}, yaml_extra: {shape}}}\n"
        for shape in ("x.yaml", "{x: y}", "[[x.yaml]]", "[null]", "[3]")
    ),
    *(
        f"models:\n- {{{ONE}, yaml_extra: [], {field}}}\n"
        for field in ("3: x", "status: fine", "tested: soon", "x: y")
    ),
    f"models:\n- {{{ONE}, yaml_extra: []}}\n- {{name: a, config_id: c, yaml_extra: []}}\n",
    "a: b\0\n",
    f"models:\n- {{{ONE}, tested: 2026-02-31, yaml_extra: []}}\n",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_registry_is_one_line(text: str) -> None:
    with pytest.raises(OnboardError) as error:
        parse_entries(text)
    assert "\n" not in str(error.value)


def test_a_registry_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = registry.models_path(tmp_path)
    path.parent.mkdir()
    path.write_bytes(b"models: \xff\n")
    with pytest.raises(OnboardError, match="cannot be read"):
        registry.load_entries(tmp_path)


@pytest.mark.parametrize(
    "name", ["../../secret", "/etc/passwd", "a/b", "..", "", ".hidden", "a\\b", "a\nb"]
)
def test_an_entry_reads_no_file_outside_configs(name: str) -> None:
    for fields in (
        {"config_id": name, "yaml_extra": []},
        {"config_id": "b", "yaml_extra": [f"{name}.yaml"]},
    ):
        with pytest.raises(ValidationError):
            RegistryEntry.model_validate({"name": "a", **fields})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen2.5-7B", "qwen2.5-7b"), ("A b+C", "a_b_c"), ("..", "_"), ("../x", "_x")],
)
def test_slug(name: str, expected: str) -> None:
    assert registry.slug(name) == expected


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("max_seq_length: 3\n")
    with pytest.raises(UsageError, match=r"x\.yaml: .*max_seq_len"):
        registry.load_standalone(path)


def _claim(root: Path, model: str) -> tuple[str, str]:
    name, config_id = registry.claim_names(model, root)
    path = registry.config_path(root, config_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"model: {registry.identity(model)}\n")
    models = registry.models_path(root)
    text = models.read_text() if models.exists() else registry.HEADER
    entry = RegistryEntry(name=name, config_id=config_id, yaml_extra=[f"{config_id}.yaml"])
    models.write_text(insert_entry(text, entry))
    return name, config_id


def test_equal_last_segments_do_not_overwrite_each_other(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folders = [tmp_path / "a" / "Tiny", tmp_path / "b" / "Tiny"]
    for folder in folders:
        folder.mkdir(parents=True)
    models = [
        "org1/Tiny",
        "org2/Tiny",
        *map(str, folders),
        "evil/dashboard_default",
        "evil/world_size_1",
    ]
    claimed = [_claim(root, model) for model in models]
    assert claimed[:2] == [("org1/Tiny", "tiny"), ("org2/Tiny", "org2--tiny")]
    assert claimed[2:4] == [("a--Tiny", "a--tiny"), ("b--Tiny", "b--tiny")]
    assert claimed[4:] == [(m, m.replace("/", "--")) for m in models[4:]]
    assert [_claim(root, model) for model in models] == claimed
    assert len(registry.load_entries(root)) == len(models)
    assert [registry.find_entry(model, root).name for model in models] == [
        name for name, _ in claimed
    ]  # type: ignore[union-attr]


def test_a_folder_that_moved_keeps_its_name(tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "tiny", tmp_path / "new" / "tiny"
    old.mkdir(parents=True)
    assert _claim(tmp_path, str(old)) == ("tiny", "tiny")
    new.parent.mkdir()
    old.rename(new)
    assert _claim(tmp_path, str(new)) == ("tiny", "tiny")


def test_a_model_whose_entry_is_lost_gets_no_second_config(tmp_path: Path) -> None:
    first = _claim(tmp_path, "org/Tiny")
    registry.models_path(tmp_path).unlink()
    assert _claim(tmp_path, "org/Tiny") == first
    registry.models_path(tmp_path).write_text("models: []\n")
    assert _claim(tmp_path, "org/Tiny") == first
    assert len(list(registry.config_path(tmp_path, "x").parent.iterdir())) == 1


def _register_many(root: Path, owner: int) -> None:
    for number in range(8):
        with registry.registry_lock(root):
            _claim(root, f"org{owner}/model-{owner}-{number}")


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_register_many, args=(tmp_path, owner)) for owner in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    names = [entry.name for entry in registry.load_entries(tmp_path)]
    assert sorted(names) == sorted(f"org{o}/model-{o}-{n}" for o in range(2) for n in range(8))
