"""What a model costs to prepare goes with its kinds of layers, not with their number or that of
their experts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import DeepseekV3Config

SECONDS, GIBIBYTES = 180, 8

# From a config to a transformed graph on the meta device, in a process whose time and memory count.
PREPARE = """
import json, resource, sys
from pathlib import Path
import torch
from onboard.analysis.analyze import analyze
from onboard.codegen.model_file import generate_model_file
from onboard.verify.blocks import prove
from onboard.config import RuntimeConfig
from onboard.graph.fx import nodes_of
from onboard.graph.pipeline import Pipeline, load_pipeline
from onboard.runtime.build import make_context

root = Path(sys.argv[1])
spec = analyze(json.loads((root / "checkpoint" / "config.json").read_text()), [], model="large")
text = generate_model_file(spec)
prove(text, spec)
(root / "models").mkdir()
(root / "models" / f"modeling_{spec.family}.py").write_text(text)

runtime = RuntimeConfig(device="cpu", dtype="bfloat16")
context = make_context(root / "checkpoint", runtime, root=root)
transforms = load_pipeline({})
keys = [transform.key for transform in transforms]
gm = Pipeline(transforms[: keys.index("load_weights")]).run(context)
usage = resource.getrusage(resource.RUSAGE_SELF)
mixtures = nodes_of(gm, torch.ops.onboard.torch_moe_fused)
print(json.dumps({
    "seconds": usage.ru_utime + usage.ru_stime,
    "gibibytes": usage.ru_maxrss / 2**20,
    "mixtures": len(mixtures),
    "experts": sorted({gm.get_parameter(node.args[3].target).shape[0] for node in mixtures}),
    "attention": len(nodes_of(gm, torch.ops.onboard.torch_mla)),
    "on_meta": all(parameter.is_meta for parameter in gm.parameters()),
    "weights": sum(parameter.numel() for parameter in gm.parameters()),
    "facts": context.facts,
}))
"""


@pytest.mark.exhaustive
def test_sixty_one_layers_of_256_experts(tmp_path: Path) -> None:
    config = DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])
    assert (config.num_hidden_layers, config.n_routed_experts, config.first_k_dense_replace) == (
        61,
        256,
        3,
    )
    config.save_pretrained(tmp_path / "checkpoint")
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, str(tmp_path)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])

    assert (found["mixtures"], found["experts"], found["attention"]) == (58, [256], 61)
    # Nor have they been run
    assert found["facts"] == ["models/modeling_deepseek_v3.py has passed no tests here"]
    assert found["on_meta"]
    assert 670e9 < found["weights"] < 673e9  # the size that the model is known by, 671B
    assert found["seconds"] < SECONDS  # of processor time: others may use this machine as well
    assert found["gibibytes"] < GIBIBYTES
