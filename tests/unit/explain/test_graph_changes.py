from __future__ import annotations

from pathlib import Path
from typing import Any

import onboard
from onboard.explain.graph_changes import (
    changes,
    chosen_profile,
    kernel_rows,
    microseconds,
    not_applied,
    owners,
)
from onboard.explain.launched_kernels import kernels_of


def _entry(key: str, matches: int, **fields: Any) -> dict[str, Any]:
    usual = {"stage": "post_load_fusion", "enabled": True, "skipped": False, "error": None}
    return usual | {"key": key, "num_matches": matches, "memory_delta": 0, "summary": ""} | fields


RUN = {
    "transforms": [
        _entry("find_kept_graph", 0, stage="cache"),
        _entry("export_to_gm", 1, nodes=[0, 9], ops={"torch_rmsnorm": 5, "linear": 4}),
        _entry(
            "fuse_rmsnorm",
            5,
            nodes=[9, 9],
            ops={"torch_rmsnorm": -5, "triton_rmsnorm": 5},
            memory_delta=7,
        ),
        _entry(
            "fuse_add_rms_norm",
            4,
            nodes=[9, 5],
            ops={"triton_rmsnorm": -4, "triton_fused_add_rmsnorm": 4},
        ),
        _entry("optimize_rope", 2, nodes=[5, 5], ops={"triton_rope_cached": 2}),
        _entry("fuse_moe", 0),
        _entry("fuse_l2norm", 0, enabled=False, skipped=True),
        _entry("fuse_linears", 0, skipped=True, summary="no Triton"),
        _entry("fold_constants", 0, skipped=True),
        _entry("broken", 0, skipped=True, enabled=True, error="ValueError: x"),
    ],
    "facts": [
        "optimize_rope: 3 rotations have no fused kernel, for example y",
        "attention: torch is used",
    ],
}
PROFILE = {
    "totals": [
        {"name": "nvjet_tst_64x8", "calls": 4, "us": 40.0},
        {"name": "_rmsnorm_kernel", "calls": 5, "us": 5.0},
        {"name": "_rope_kernel", "calls": 2, "us": 3.0},
        {"name": "onboard::triton_rope_cached", "calls": 1, "us": 0.5},
    ]
}


def test_an_operator_belongs_to_the_transform_that_put_it_in_last() -> None:
    assert owners(RUN) == {
        "linear": "export_to_gm",
        "triton_rmsnorm": "fuse_rmsnorm",
        "triton_fused_add_rmsnorm": "fuse_add_rms_norm",
        "triton_rope_cached": "optimize_rope",
    }


def test_kernels_are_those_of_the_operators_source() -> None:
    assert {"_rmsnorm_kernel"} <= kernels_of("triton_rmsnorm")
    assert "_rope_kernel" not in kernels_of("triton_rmsnorm")
    assert not kernels_of("torch_rmsnorm")
    assert not kernels_of("no_such_op")
    folder = Path(onboard.__file__).parent / "ops"
    found = {
        name for op in ("triton_rope_cached", "triton_cached_attention") for name in kernels_of(op)
    }
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert all(f"def {name}(" in text for name in found)


def test_microseconds_are_of_kernels_that_one_transform_alone_brought() -> None:
    rows = {row["name"]: row for row in kernel_rows(RUN, PROFILE)}
    assert rows["nvjet_tst_64x8"]["ops"] == []
    assert rows["_rmsnorm_kernel"]["transforms"] == ["fuse_add_rms_norm", "fuse_rmsnorm"]
    assert rows["_rope_kernel"]["transforms"] == ["optimize_rope"]
    assert microseconds(RUN, PROFILE) == {"optimize_rope": 3.5}
    assert microseconds(RUN, None) == {}


def test_what_changed_is_listed_and_what_did_not_apply_says_why() -> None:
    found = {each["key"]: each for each in changes(RUN, PROFILE)}
    assert list(found) == ["export_to_gm", "fuse_rmsnorm", "fuse_add_rms_norm", "optimize_rope"]
    assert found["fuse_rmsnorm"] == {
        "stage": "post_load_fusion",
        "key": "fuse_rmsnorm",
        "matches": 5,
        "nodes": [9, 9],
        "ops": {"torch_rmsnorm": -5, "triton_rmsnorm": 5},
        "memory_bytes": 7,
        "microseconds": None,
    }
    why = {key: each["why"] for each in not_applied(RUN) for key in each["keys"]}
    assert why == {
        "optimize_rope": "optimize_rope: 3 rotations have no fused kernel, for example y",
        "fuse_moe": "it looked, and the graph has nothing that it fits",
        "fuse_l2norm": "it is off, as the pipeline or the settings say",
        "fuse_linears": "no Triton",
        "fold_constants": "it was skipped, and no reason is on record",
        "broken": "it failed: ValueError: x",
    }


def test_a_profile_is_that_of_a_gpu() -> None:
    shapes = [
        {"max_concurrency": batch, "input_len": 128, "profile": {"step_us": float(batch)}}
        for batch in (8, 1)
    ]
    bench = {"date": "d", "hardware": {"device": "H"}, "results": shapes, "device_type": "cuda"}
    found = chosen_profile(bench)
    assert found is not None
    assert (found["batch"], found["step_us"], found["device"]) == (1, 1.0, "H")
    assert chosen_profile(bench | {"device_type": "cpu"}) is None
    assert chosen_profile(bench | {"results": [{"max_concurrency": 1, "input_len": 1}]}) is None
    assert chosen_profile({}) is None
