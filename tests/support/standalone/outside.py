"""Uses exported packages in a process that cannot import onboard: python outside.py JOBS.json
RESULTS.safetensors.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

STAND_IN = Path(__file__).with_name("stand_in")


class _NoOnboard(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] == "onboard":
            raise ImportError(f"{name} is out of reach")


def plain(job: dict[str, Any]) -> Any:
    """Return the logits of each text; the package's own test has passed."""
    import torch

    package = importlib.import_module(job["package"])
    model = package.load(job["checkpoint"], dtype=torch.float32)
    os.environ["CHECKPOINT"] = job["checkpoint"]
    own = run_path(str(Path(job["folder"], "tests", "test_against_transformers.py")))
    own["test_logits_are_those_of_transformers"]()
    with torch.no_grad():
        return [
            model(ids, package.positions(model, ids)).logits[0] for ids in map(_row, job["texts"])
        ]


def vllm(job: dict[str, Any]) -> Any:
    """Return the logits of each text; all are computed in one row."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.layers import attention

    importlib.import_module(job["package"]).register()
    config = AutoConfig.from_pretrained(job["checkpoint"])
    module, _, name = ModelRegistry.models[config.architectures[0]].partition(":")
    model_class = getattr(importlib.import_module(module), name)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, dtype=torch.float32),
        cache_config=SimpleNamespace(layers=[]),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        quant_config=None,
    )
    with torch.device("cpu"):
        model = model_class(vllm_config=vllm_config, prefix="")
    assert len(vllm_config.cache_config.layers) == config.num_hidden_layers
    filled = model.load_weights(load_file(Path(job["checkpoint"], "model.safetensors")).items())
    assert filled == {name for name, _ in model.named_parameters()}
    attention.LENGTHS[:] = [len(text) for text in job["texts"]]
    positions = torch.cat([torch.arange(length) for length in attention.LENGTHS])
    with torch.no_grad():
        states = model(input_ids=torch.tensor(sum(job["texts"], [])), positions=positions)
        return model.compute_logits(states).split(attention.LENGTHS)


def _row(text: list[int]) -> Any:
    import torch

    return torch.tensor([text])


def main(jobs: Path, results: Path) -> None:
    sys.meta_path.insert(0, _NoOnboard())
    sys.path[:0] = [str(STAND_IN)]
    from safetensors.torch import save_file

    tensors = {}
    for name, job in json.loads(jobs.read_text()).items():
        sys.path.insert(0, job["folder"])
        logits = {"plain": plain, "vllm-plugin": vllm}[job["to"]](job)
        tensors |= {
            f"{name}.{index}": each.contiguous().clone() for index, each in enumerate(logits)
        }
    assert not any(name.partition(".")[0] == "onboard" for name in sys.modules)
    save_file(tensors, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
