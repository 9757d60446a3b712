"""Runs exported programs in a process that can import neither onboard nor transformers: python
program_outside.py JOBS.json RESULTS.json.
"""

from __future__ import annotations

import importlib
import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class _TorchAlone(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in ("onboard", "transformers"):
            raise ImportError(f"{name} is out of reach")


def answers(job: dict[str, Any]) -> dict[str, Any]:
    """Return the greedy tokens of each prompt, those of the first prompt in two pieces, and the
    error of a wrong `end_idx`.
    """
    import torch

    package = importlib.import_module(job["package"])
    model = package.load()
    tokens = [list(package.generate(model, prompt, job["count"])) for prompt in job["prompts"]]
    first, half = package.DESCRIPTION["first_position"], len(job["prompts"][0]) // 2
    device = package.DESCRIPTION["device"]
    caches = package.empty_caches(2)
    start = 0
    for piece in (job["prompts"][0][:half], job["prompts"][0][half:]):
        ids, end = torch.tensor([piece, piece], device=device), start + len(piece)
        places = torch.arange(start, end, device=device).repeat(2, 1) + first
        with torch.no_grad():
            logits, *caches = model(ids, places, *caches, start, end)
        start = end
    try:
        model(ids, places, *caches, start, start + len(piece) + 1)
        problem = ""
    except (RuntimeError, AssertionError) as error:
        problem = type(error).__name__
    return {"tokens": tokens, "pieces": logits[:, -1].argmax(-1).tolist(), "problem": problem}


def main(jobs: Path, results: Path) -> None:
    sys.meta_path.insert(0, _TorchAlone())
    found = {}
    for name, job in json.loads(jobs.read_text()).items():
        sys.path.insert(0, job["folder"])
        found[name] = answers(job)
    assert not {name.partition(".")[0] for name in sys.modules} & {"onboard", "transformers"}
    results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
