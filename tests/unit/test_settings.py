from __future__ import annotations

from onboard.cli.options import CacheDTypeName
from onboard.cli.setting_options import settings_of
from onboard.config import RuntimeConfig, with_settings


def test_options_and_assignments_are_one_nested_mapping() -> None:
    words = [
        "kv_cache_config.dtype=float8_e4m3fn",
        "cuda_graph_config.batch_sizes=[1, 8]",
        "overlap=null",
        "transforms.fuse_linears.enabled=false",
        "model_kwargs.num_hidden_layers=2",
    ]
    found = settings_of(
        words, max_seq_len=64, revision=None, kv_cache_config__dtype=CacheDTypeName.FLOAT16
    )
    assert found == {
        "max_seq_len": 64,
        "kv_cache_config": {"dtype": "float8_e4m3fn"},
        "cuda_graph_config": {"batch_sizes": [1, 8]},
        "overlap": None,
        "transforms": {"fuse_linears": {"enabled": False}},
        "model_kwargs": {"num_hidden_layers": 2},
    }


def test_settings_replace_single_fields_and_are_set_ones() -> None:
    config = RuntimeConfig.model_validate(
        {"max_batch_size": 3, "kv_cache_config": {"tokens_per_block": 8}}
    )
    changed = with_settings(config, {"max_seq_len": 512, "kv_cache_config": {"dtype": "float16"}})
    assert (changed.max_batch_size, changed.max_seq_len) == (3, 512)
    assert (changed.kv_cache_config.tokens_per_block, changed.kv_cache_config.dtype) == (
        8,
        "float16",
    )
    assert "max_seq_len" in changed.model_fields_set, "the default's value, but asked for"
    assert config.kv_cache_config.dtype == "auto"
