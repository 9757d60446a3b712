"""A plan that was made is found again for the same config and settings, and for no other."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onboard.cache.budget import CachePlan, Limits, MemoryPlan
from onboard.cache.resources import KVPagedResource, StateResource
from onboard.config import RuntimeConfig
from onboard.runtime.kept_plan import KeptPlan

LIMITS = Limits(
    max_batch_size=3, max_seq_len=100, max_num_tokens=24, page_size=4, snapshots=2, max_tokens=90
)
RESOURCES = (
    *[KVPagedResource(2, 8, torch.bfloat16, 4)] * 3,
    KVPagedResource(2, 8, torch.float8_e4m3fn, 4, sliding_window=16, tokens_per_key=2),
    StateResource((4, 6), torch.float32),
    StateResource((2,), torch.int64, carries=False),
    KVPagedResource(2, 8, torch.bfloat16, 4),
)
PLAN = MemoryPlan(
    cache=CachePlan(LIMITS, RESOURCES),
    **{
        "parameters": 1000,
        "weights": 2000,
        "tables": 64,
        "inputs": 300,
        "activations": 4000,
        "step_tokens": 24,
    },
    **{
        "graphs": 80,
        "reserve": 90,
        "memory": 2**20,
        "positions": 256,
        "fraction": 0.9,
        "chosen": ("max_seq_len",),
    },
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONBOARD_CACHE", str(tmp_path / "cache"))


def _place(folder: Path, *, config: str = "{}", gpu: bool = True, **runtime: Any) -> KeptPlan:
    (folder / "config.json").write_text(config)
    return KeptPlan(folder, RuntimeConfig.model_validate(runtime), gpu=gpu, root=folder)


def test_a_kept_plan_says_what_the_one_that_was_made_says(tmp_path: Path) -> None:
    _place(tmp_path).keep(PLAN, ["a fact"])
    found = _place(tmp_path, model="elsewhere").find()
    assert found is not None
    kept, facts = found
    assert facts == ["a fact"]
    assert replace(kept, cache=PLAN.cache) == PLAN
    assert kept.limits == LIMITS
    for plan in (kept, kept.over(4, 2**13)):
        other = replace(plan, cache=PLAN.cache)
        assert (plan.pages, plan.caches, plan.total, plan.fits()) == (
            other.pages,
            other.caches,
            other.total,
            other.fits(),
        )
        forms = [
            [(g.form, g.caches, g.units, g.num_bytes) for g in each.cache.groups(7)]
            for each in (plan, other)
        ]
        assert forms[0] == forms[1]
        assert [plan.largest_batch(length) for length in (8, 64)] == [
            other.largest_batch(length) for length in (8, 64)
        ]


def test_what_a_plan_depends_on_is_in_its_key(tmp_path: Path) -> None:
    _place(tmp_path).keep(PLAN, [])
    assert _place(tmp_path).find() is not None
    assert _place(tmp_path, config="{ }").find() is None
    assert _place(tmp_path, gpu=False).find() is None
    assert _place(tmp_path, max_seq_len=99).find() is None
    for name in (
        "models/modeling_other.py",
        "transforms/default.yaml",
        ".onboard/other/tests.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("# new")
        assert _place(tmp_path).find() is None, name
        (tmp_path / name).unlink()
        assert _place(tmp_path).find() is not None


def test_a_damaged_plan_is_made_again_and_none_is_kept_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _place(tmp_path).keep(PLAN, [])
    (file,) = (tmp_path / "cache" / "plans").iterdir()
    whole = file.read_text()
    for text in (whole[:-9], "{}", whole.replace("pages", "papers"), whole.replace('"gpu', '"cpu')):
        file.write_text(text)
        assert _place(tmp_path).find() is None
    monkeypatch.setenv("ONBOARD_CACHE", "")
    _place(tmp_path).keep(PLAN, [])
    assert _place(tmp_path).find() is None


def test_it_is_found_without_torch(tmp_path: Path) -> None:
    _place(tmp_path).keep(PLAN, [])
    code = f"""if True:
        import sys
        from pathlib import Path
        from onboard.config import RuntimeConfig
        from onboard.runtime.kept_plan import KeptPlan
        folder = Path({str(tmp_path)!r})
        plan, _ = KeptPlan(folder, RuntimeConfig(), gpu=True, root=folder).find()
        print(plan.total, "torch" in sys.modules)"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == [str(PLAN.total), "False"]
