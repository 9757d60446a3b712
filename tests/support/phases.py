"""Small artifacts of a finished road, as the phases before would have left them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from onboard.analysis.spec import LayerKind, ModelSpec, Trait
from onboard.registry import slug
from onboard.workflow.files import FileWriter
from onboard.workflow.phase import RunContext, RunOptions
from onboard.workflow.worklog import Worklog
from tests.unit.spec_samples import sample_block

LLAMA_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 96,
    "dtype": "float32",
}


class FolderSource:
    """A `ModelSource` of a local folder."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.model, self.revision, self._folder, self._config = str(folder), None, folder, config

    def config(self) -> dict[str, Any]:
        return self._config

    def files(self) -> Path:
        return self._folder

    def weights(self) -> Path:
        return self._folder


def make_spec(model: str, **changes: Any) -> ModelSpec:
    config = LLAMA_CONFIG | changes.pop("config", {})
    fields: dict[str, Any] = {
        "model": model,
        "family": "llama",
        "architecture": "LlamaForCausalLM",
        "config_class": "LlamaConfig",
        "hf_module": "transformers.models.llama.modeling_llama",
        "transformers_version": "5.23.0",
        "source_hash": "0" * 64,
        "num_parameters": 100_000,
        "config": config,
        "traits": {
            "attention": Trait(value="gqa", evidence="config.json: num_key_value_heads"),
            "rope": Trait(value="half", evidence="probe: error 0"),
            "sliding_window": Trait(value=None, evidence="config.json: sliding_window"),
            "tied_embeddings": Trait(value=True, evidence="config.json: tie_word_embeddings"),
        },
        "blocks": [
            sample_block("LlamaRMSNorm", "rmsnorm", "model.norm", "modeling_llama.py:10"),
            sample_block(
                "LlamaDecoderLayer", "decoder_layer", "model.layers.0", "modeling_llama.py:9"
            ),
        ],
        "layer_kinds": [LayerKind(name="full_attention", layers=[0, 1, 2], path="model.layers.0")],
    }
    return ModelSpec.model_validate(fields | changes)


def make_context(root: Path, model: str, *, dry_run: bool = False, **changes: Any) -> RunContext:
    """A context for `model` under `root`, with its spec written."""
    spec = make_spec(model, **changes)
    work_dir = root / ".onboard" / slug(model.rsplit("/", 1)[-1])
    work_dir.mkdir(parents=True, exist_ok=True)
    spec.save(work_dir / "spec.yaml")
    return RunContext(
        model=model,
        root=root,
        work_dir=work_dir,
        options=RunOptions(dry_run=dry_run),
        files=FileWriter(dry_run=dry_run),
        worklog=Worklog(None if dry_run else work_dir / "worklog.md"),
        source=FolderSource(root, spec.config),  # type: ignore[arg-type]
    )


ContextFactory = Callable[..., RunContext]


def make_run(
    *,
    device: str = "cpu",
    dtype: str = "float32",
    graphs: bool = False,
    agrees: bool = True,
    status: str = "success",
    verdict: str = "equal",
) -> dict[str, Any]:
    """The artifact of the run phase."""
    settings = {
        "device": device,
        "device_name": device.upper(),
        "dtype": dtype,
        "attn_backend": "triton" if device == "cuda" else "torch",
        "compile_backend": "torch-cudagraph" if device == "cuda" else "torch-simple",
        "world_size": 1,
        "max_seq_len": 96,
        "num_hidden_layers": 3,
    }
    prompt = {
        "prompt": "How big is the <universe>? & `why`",
        "chat": False,
        "token_ids": [1, 2, 3, 4, 5],
        "output": " Very | big\n<b>indeed</b>",
        "output_ids": [6, 7, 8, 9],
        "finish_reason": "length",
    }
    full = {
        "description": "all layers",
        "status": status,
        "error": None,
        "settings": settings,
        "prompts": [prompt, prompt | {"prompt": "Two"}],
        "seconds": {"build": 1.5, "generate": 0.5},
        "tokens_per_second": 16.0,
        "peak_memory_bytes": 123_456_789,
        "transforms": [
            {"key": "build_model", "stage": "factory", "enabled": True, "skipped": False, "num_matches": 1,
             "seconds": 0.5, "memory_delta": 0, "error": None},
            {"key": "match_rmsnorm", "stage": "pattern_matcher", "enabled": True, "skipped": False, "num_matches": 7,
             "seconds": 0.01, "memory_delta": 0, "error": None},
        ],
        "facts": ["attention: torch back end on the CPU"],
        "cuda_graphs": {"used": graphs, "replays": 9 if graphs else 0, "batch_sizes": [1, 2] if graphs else []},
        "comparison": {
            "agrees": agrees,
            "checks": [
                {"what": "prefill", "tokens": 8, "longest": 9, "error": 2e-7, "limit": 1e-5, "transformers": None},
            ],
            "tokens": {"compared": 8, "ties": 0, "differing": 0 if agrees else 3, "allowed": 0, "largest_gap": 0.0},
            "reference": "whole",
            "notes": [],
        },
        "text": {"verdict": verdict, "reason": "held-out perplexity 9.1, transformers' 9.1", "perplexity": 9.1},
        "log": "tiny_20260101-000000_success.log",
    }  # fmt: skip
    reduced = full | {
        "description": "2 of 3 layers",
        "settings": settings | {"num_hidden_layers": 2},
    }
    return {
        "status": status,
        "config": "registry/configs/tiny.yaml",
        "command": "python -m x",
        "runs": {"reduced": reduced, "full": full},
    }


def onboarded(context: RunContext, **run: Any) -> RunContext:
    """A context of a model with all artifacts up to the report."""
    from onboard.workflow.phases.cookbook import Cookbook
    from onboard.workflow.phases.matrix import Matrix
    from onboard.workflow.phases.register import Register

    Register().run(context)
    test = {"name": "test_mlp", "level": "block", "block": "mlp", "status": "passed", "message": ""}
    context.write_json(
        "tests.json", {"command": "python -m pytest t.py", "output": "1 passed\n", "tests": [test]}
    )
    items = [
        {
            "id": "C1",
            "title": "canonical ops",
            "kind": "contract",
            "verdict": "PASS",
            "evidence": [],
        },
        {
            "id": "S1",
            "title": "no repeats",
            "kind": "style",
            "verdict": "NOTE",
            "evidence": ["models/m.py:7: a | b"],
        },
    ]
    context.write_json("review.json", {"verdict": "PASS", "notes": 1, "items": items})
    context.write_json("run.json", make_run(**run))
    (context.root / "models").mkdir(exist_ok=True)
    (context.root / "models" / "modeling_llama.py").write_text("x = 1\n")
    Matrix().run(context)
    Cookbook().run(context)
    return context
