"""The second start takes the graph of the first; whatever the graph depends on, a change of it
makes a new one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from onboard import user_cache
from onboard.bench.work import weights_of
from onboard.config import RuntimeConfig
from onboard.graph import graph_cache
from onboard.graph.assembly.assemble import load_pipeline
from onboard.graph.graph_cache import GraphCache, _lengths, cache_folder, key_parts
from onboard.graph.pipeline import Pipeline
from onboard.graph.saved_graph import CannotSaveError, decode, encode
from onboard.runtime.build import make_context
from onboard.runtime.engine import Engine
from onboard.runtime.sampling_params import SamplingParams
from tests.support.runtime.tiny import Tiny

IDS = [5, 1, 40, 7, 7, 23, 9]
RUN = {
    "max_seq_len": 64,
    "max_batch_size": 4,
    "max_num_tokens": 64,
    "device": "cpu",
    "dtype": "float32",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def made(tiny: Callable[..., Tiny]) -> Tiny:
    return tiny("llama")


def _from_cache(engine: Engine) -> list[str]:
    return [entry.key for entry in engine.history if entry.from_cache]


def _close(engine: Engine, tiny: Tiny) -> None:
    expected = tiny.logits(IDS)
    error = (engine.logits(IDS) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= 1e-5


def test_the_second_start_takes_the_graph_of_the_first(made: Tiny, folder: Path) -> None:
    first, second = made.engine(), made.engine()
    assert not _from_cache(first)
    assert len(list(folder.glob("*.safetensors"))) == 1
    ran = [entry.key for entry in second.history if entry.enabled and not entry.from_cache]
    acting = [
        "load_weights",
        "initialize_cache",
        "resize_kv_cache",
        "compile_model",
        "call_ops_directly",
    ]
    assert ran == ["find_kept_graph", *acting]
    _close(first, made)
    _close(second, made)
    assert torch.equal(first.logits(IDS), second.logits(IDS))
    assert first.facts == second.facts
    before = {entry.key: entry for entry in first.history}
    for entry in filter(lambda entry: entry.from_cache, second.history):
        now, then = (
            (each.num_matches, each.enabled, each.skipped, each.nodes, each.ops, each.summary)
            for each in (entry, before[entry.key])
        )
        assert now == then
    assert [str(node.target) for node in first.gm.graph.nodes] == [
        str(node.target) for node in second.gm.graph.nodes
    ]
    assert first.cache.resources == second.cache.resources
    assert [name for name, _ in first.gm.named_parameters()] == [
        name for name, _ in second.gm.named_parameters()
    ]


def test_other_weights_of_the_same_shapes_are_the_new_ones(made: Tiny, folder: Path) -> None:
    made.engine()
    state = load_file(made.checkpoint / "model.safetensors")
    for tensor in state.values():
        tensor.copy_(torch.randn_like(tensor) * 0.2)
    save_file(state, made.checkpoint / "model.safetensors", metadata={"format": "pt"})
    made.hf.load_state_dict(state, strict=False)
    second = made.engine()
    assert _from_cache(second)
    _close(second, made)


def test_parameters_computed_from_others_are_computed_again(
    tiny: Callable[..., Tiny], folder: Path
) -> None:
    made = tiny("gemma", own_file=False, head_dim=8)
    runtime = {"transforms": {"fuse_rmsnorm": {"rmsnorm_backend": "torch"}}}
    first, second = made.engine(**runtime), made.engine(**runtime)
    assert _from_cache(second)
    names = [sorted(name for name, _ in each.gm.named_parameters()) for each in (first, second)]
    assert names[0] == names[1]
    assert any("folded." in name for name in names[1])
    _close(first, made)
    _close(second, made)


def test_stacked_experts_are_read_into_their_stacks(
    tiny: Callable[..., Tiny], folder: Path
) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    made = tiny("qwen3_moe", own_file=False, **sizes)
    first, second = made.engine(), made.engine()
    assert _from_cache(second)
    assert any(parameter.ndim == 3 for parameter in second.gm.parameters())
    read = weights_of(second.gm)
    assert read == weights_of(first.gm), "what a benchmark says of a kept graph is something else"
    assert [each.chosen for each in read.experts] == [2, 2]
    _close(first, made)
    _close(second, made)


def _edit_model_file(tiny: Tiny) -> None:
    path = tiny.root / "models" / "modeling_llama.py"
    path.write_text(path.read_text() + "\n# changed\n")


def _edit_config(tiny: Tiny) -> None:
    path = tiny.checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))


def _edit_checkpoint(tiny: Tiny) -> None:
    path = tiny.checkpoint / "model.safetensors"
    state = load_file(path)
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})


EDITS: dict[str, Callable[[Tiny], None]] = {
    "model file": _edit_model_file,
    "config": _edit_config,
    "the checkpoint's dtypes": _edit_checkpoint,
}
FIELDS: dict[str, dict[str, Any]] = {
    "cache dtype": {"kv_cache_config": {"dtype": "bfloat16"}},
    "dtype": {"dtype": "bfloat16"},
    "fewer layers": {"model_kwargs": {"num_hidden_layers": 1}},
    "a transform's field": {"transforms": {"fuse_rmsnorm": {"rmsnorm_backend": "torch"}}},
    "a transform less": {"transforms": {"fuse_gemms": {"enabled": False}}},
    "a transform more": {"transforms": {"multi_stream_moe": {"enabled": True}}},
    "compile back end": {"compile_backend": "torch-simple"},
    "random weights": {"skip_loading_weights": True},
}


def _key(tiny: Tiny, **fields: Any) -> dict[str, Any]:
    context = make_context(tiny.checkpoint, RuntimeConfig(**{**RUN, **fields}), root=tiny.root)
    return key_parts(context, load_pipeline(context.runtime.transforms))


@pytest.mark.parametrize("name", EDITS)
def test_a_change_of_the_inputs_changes_the_key(made: Tiny, name: str) -> None:
    before = _key(made)
    assert _key(made) == before
    EDITS[name](made)
    assert _key(made) != before


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_what_is_said_of_codes_is_in_the_key_of_random_weights(made: Tiny, name: str) -> None:
    before, path = _key(made, skip_loading_weights=True), made.checkpoint / name
    config = json.loads(path.read_text()) if path.exists() else {}
    said = {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps({**config, **said}))
    assert _key(made, skip_loading_weights=True) != before


def test_a_change_of_the_settings_changes_the_key(made: Tiny) -> None:
    keys = {"none": _key(made)} | {name: _key(made, **fields) for name, fields in FIELDS.items()}
    texts = {name: json.dumps(key, sort_keys=True, default=str) for name, key in keys.items()}
    assert len(set(texts.values())) == len(texts)


ROOM: dict[str, Any] = {
    "max_seq_len": 90,
    "max_batch_size": 3,
    "max_num_tokens": 11,
    "overlap": True,
    "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 104, "enable_block_reuse": False},
}


def test_how_much_a_run_holds_is_not_in_the_key(made: Tiny) -> None:
    assert _key(made, **ROOM) == _key(made)


@pytest.mark.parametrize("window", [None, 9])
def test_a_run_of_other_room_takes_the_kept_graph_and_computes_the_same(
    tiny: Callable[..., Tiny], folder: Path, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    options = {} if window is None else {"sliding_window": window, "head_dim": 8}
    model = tiny("llama" if window is None else "gemma2", own_file=window is None, **options)
    model.engine()
    room = {
        "max_seq_len": 50,
        "max_batch_size": 3,
        "max_num_tokens": 5,
        "kv_cache_config": {"tokens_per_block": 8},
    }
    kept = model.engine(**room)
    monkeypatch.setenv("ONBOARD_CACHE", "")
    fresh = model.engine(**room)
    assert _from_cache(kept)
    assert not _from_cache(fresh)
    assert [str(node.target) for node in kept.gm.graph.nodes] == [
        str(node.target) for node in fresh.gm.graph.nodes
    ]
    assert kept.cache.resources == fresh.cache.resources
    assert {name: each.shape for name, each in kept.cache.caches.items()} == {
        name: each.shape for name, each in fresh.cache.caches.items()
    }
    _close(kept, model)
    [output] = kept.submit(IDS, SamplingParams(temperature=0.0, max_tokens=30))
    kept.run()
    assert output.generated == model.greedy(IDS, 30)


def test_a_graph_is_kept_for_the_lengths_that_would_give_the_same(
    tiny: Callable[..., Tiny], folder: Path
) -> None:
    """Where sequences are no longer than a window, its pages are everyone's."""
    model = tiny("gemma2", own_file=False, sliding_window=9, head_dim=8)
    model.engine()
    for length, is_kept in ((10, True), (64, True), (9, False), (10, False), (9, False)):
        engine = model.engine(max_seq_len=length)
        assert bool(_from_cache(engine)) == is_kept, length
        assert len(engine.cache.groups) == (1 if length <= 9 else 2)
    context = make_context(model.checkpoint, RuntimeConfig(**RUN), root=model.root)
    assert _lengths(context) == [1, 64]  # nothing is known of the graph beyond those of the run
    context.longest = 1000
    assert _lengths(context) == [1, 1000]


def test_code_libraries_device_and_switches_are_in_the_key(
    made: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _key(made)
    for module, name, other in [
        (graph_cache, "code_digest", lambda: "other"),
        (user_cache, "_version", lambda library: "0" if library == "torch" else None),
        (graph_cache, "_device", lambda device: ["cuda", "another"]),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            assert _key(made) != before
    monkeypatch.setenv("TRITON_INTERPRET", "other")
    assert _key(made) != before


def test_where_the_checkpoint_lies_is_not_in_the_key(made: Tiny, tmp_path: Path) -> None:
    before = _key(made)
    made.checkpoint = Path(shutil.copytree(made.checkpoint, tmp_path / "elsewhere"))
    assert _key(made) == before


def _file(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    with safe_open(path, framework="pt") as file:
        graph = file.metadata()["graph"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert change(graph) != graph
    save_file(tensors, path, metadata={"graph": change(graph)})


CHANGES: dict[str, Callable[[str], str]] = {
    "another function": lambda text: text.replace("_operator:getitem", "os:system"),
    "another class": lambda text: text.replace(
        "onboard.cache.resources:KVPagedResource", "subprocess:Popen"
    ),
    "cut off": lambda text: text[:-20],
    "another key": lambda text: text.replace(
        r"\"cache_dtype\": \"auto\"", r"\"cache_dtype\": \"other\""
    ),
}


def test_a_file_that_was_tampered_with_or_damaged_is_not_taken(
    made: Tiny, folder: Path, tmp_path: Path
) -> None:
    first = made.engine()
    path, cache = _file(folder), GraphCache(folder)
    kept = path.read_bytes()
    context = make_context(
        made.checkpoint,
        RuntimeConfig(**RUN, kv_cache_config={"tokens_per_block": 4}),
        root=made.root,
    )
    parts = key_parts(context, load_pipeline({}))
    assert cache.find(parts, context) is not None
    for name, change in CHANGES.items():
        path.write_bytes(kept)
        _rewrite(path, change)
        assert cache.find(parts, context) is None, name
    path.write_bytes(kept[:100])
    assert cache.find(parts, context) is None
    second = made.engine()
    assert not _from_cache(second)
    assert _file(folder).read_bytes() == kept, "what was damaged is made again"
    assert torch.equal(first.logits(IDS), second.logits(IDS))


def _replaced(parameter: Any) -> None:
    parameter.data = parameter.data.flip(0)


def _written_unseen(parameter: Any) -> None:
    parameter.data.copy_(parameter.data.flip(0))


@pytest.mark.parametrize("write", [lambda parameter: parameter.mul_(1), _replaced, _written_unseen])
def test_parameters_that_were_written_to_after_loading_are_not_kept(
    made: Tiny, folder: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], None]
) -> None:
    from onboard.content.transforms.post_load_fusion.fuse_swiglu import FuseSwiGLU

    original = FuseSwiGLU.apply

    def apply(self: Any, gm: Any, context: Any) -> Any:
        write(next(iter(gm.parameters())))
        return original(self, gm, context)

    monkeypatch.setattr(FuseSwiGLU, "apply", apply)
    made.engine()
    assert not list(folder.glob("*.safetensors"))


def test_observers_see_every_step(made: Tiny, folder: Path) -> None:
    from onboard.runtime.build import build_engine

    made.engine()
    seen: list[str] = []
    runtime = RuntimeConfig(**RUN, kv_cache_config={"tokens_per_block": 4})
    build_engine(
        made.checkpoint, runtime, root=made.root, observer=lambda key, *_: seen.append(key)
    )
    assert "export_to_gm" in seen


def test_whoever_looks_at_the_graph_sees_it_at_every_start(
    made: Tiny, folder: Path, tmp_path: Path
) -> None:
    pages, seen = tmp_path / "pages", list[dict[str, bytes]]()
    looking = {"enabled": True, "debug_visualize_dir": str(pages)}
    for _ in range(2):
        shutil.rmtree(pages, ignore_errors=True)
        made.engine(transforms={"visualize_namespace": looking})
        seen.append({path.name: path.read_bytes() for path in pages.iterdir()})
    assert seen[0] == seen[1]
    assert {"namespace.html", "namespace.json"} < seen[0].keys()


@pytest.mark.parametrize(
    ("fields", "is_shown"),
    [
        ({}, False),
        ({"visualize_namespace": {"enabled": True}}, True),
        ({"fuse_gemms": {"debug_visualize_dir": "dumps"}}, True),
        ({"fuse_gemms": {"debug_visualize_dir": "dumps", "enabled": False}}, False),
    ],
)
def test_a_start_in_which_nobody_looks_may_use_the_cache(
    fields: dict[str, Any], is_shown: bool
) -> None:
    assert Pipeline(load_pipeline(fields))._is_shown() == is_shown
    assert Pipeline(load_pipeline(fields), dump_dir=Path("dumps"))._is_shown()


def test_that_a_transform_found_nothing_is_a_fact_of_the_start_that_asks_for_it(
    made: Tiny, folder: Path
) -> None:
    fact = "match_l2norm_pattern found nothing to do, and the run's settings enable it"
    for told in (False, True, False):
        settings = {"match_l2norm_pattern": {"enabled": True}} if told else {}
        assert (fact in made.engine(transforms=settings).facts) == told
    assert len(list(folder.glob("*.safetensors"))) == 1, "the graph is the same"


def test_what_was_not_used_for_longest_is_forgotten(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path, most_bytes=250)
    for index in range(4):
        (tmp_path / f"{index}.safetensors").write_bytes(bytes(100))
        os.utime(tmp_path / f"{index}.safetensors", (index, index))
    cache._forget()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.safetensors", "3.safetensors"]


def test_the_folder_is_the_users_cache_unless_one_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ONBOARD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "onboard" / "graphs"
    monkeypatch.setenv("ONBOARD_CACHE", "")
    assert cache_folder() is None


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONBOARD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for such a user
    assert cache_folder() is None


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -2.5, float("inf"), "text", torch.bfloat16, torch.device("cpu"), torch.strided,
     torch.contiguous_format, (1, [2, (3,)]), slice(1, None, 2), {"a": (1,)}, {"b", "a"}, [], ()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_arguments_come_back_as_they_were(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value))), {})
    assert again == value
    assert type(again) is type(value)


def test_what_is_no_data_is_refused() -> None:
    for value in (object(), lambda: 0, torch.ones(2), 1j):
        with pytest.raises(CannotSaveError):
            encode(value)
