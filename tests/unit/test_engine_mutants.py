"""Another test of the tests: no mistake in a transform, an op or the runtime goes unnoticed by its
area's tests.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mutation.engine_areas import AREAS
from tests.support.mutation.engine_mutants import OPERATORS, ROOT, Draw, places

STAGES = ("post_export", "pattern_matcher", "weight_load", "post_load_fusion", "cache_init")
SEED = int(os.environ.get("ONBOARD_MUTATION_SEED", "11"))
FEW = int(os.environ.get("ONBOARD_ENGINE_MUTANTS", "1"))
QUICK = ("attention", "patterns")
"""Areas of which a sample is drawn every time."""
PROGRAM = ("-m", "tests.support.mutation.engine_mutants")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process: this one has imported what is to be mutated."""
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr[-5000:])
    return done


@pytest.mark.slow
def test_no_mutant_of_a_sample_goes_unnoticed() -> None:
    areas = [part for name in QUICK for part in ("--area", name)]
    assert _run(*PROGRAM, "--seed", str(SEED), "--count", str(FEW), *areas).returncode == 0


@pytest.mark.exhaustive
def test_no_mutant_of_sixty_goes_unnoticed() -> None:
    assert _run(*PROGRAM, "--seed", str(SEED), "--count", "60").returncode == 0


OUTCOMES = """
from dataclasses import replace
from tests.support.mutation.engine_areas import AREAS
from tests.support.mutation.engine_mutants import ROOT, outcome
path = ROOT / "onboard/ops/recurrences/advance.py"
text = path.read_text()
wrong = text.replace("kv_lens == 1", "kv_lens == 2")
assert wrong != text
near, far = (replace(AREAS["recurrences"], tests=(f"ops/test_op_{name}.py",)) for name in ("cached_state", "rope"))
cases = (near, text), (near, wrong), (far, wrong), (near, "import nothing")
found = [outcome(area, path, each) for area, each in cases]
assert found == ["survived", "killed", "survived", "does not load"], found
"""


@pytest.mark.slow
def test_tests_decide_what_becomes_of_a_mutant() -> None:
    assert _run("-c", OUTCOMES).returncode == 0


SOURCE = '''
def f(x: int | None, cuda: bool) -> int:
    """a < b"""
    assert x < 1
    if cuda and x < 2:
        x = x - 3
    elif x < 4:
        raise ValueError(f"{x < 5}", x < 6)
    return g(x < 7, is_clean=x < 8)
'''


def test_what_only_people_read_is_not_mutated() -> None:
    found = {
        ast.unparse(node)
        for node in places(ast.parse(SOURCE), Path("x.py"))
        if isinstance(node, ast.Compare)
    }
    assert found == {"x < 4", "x < 7"}


def test_a_choice_between_two_ways_to_the_same_is_not_mutated() -> None:
    free, other = ({*places(ast.parse(f"def {name}(x): return x < 1"), Path("cached_attention.py"))} for name in
                   ("_share_a_call", "anything"))  # fmt: skip
    assert not free
    assert other


def test_a_seed_draws_the_same_mutants_and_none_twice() -> None:
    draws = [Draw(5, [AREAS["attention"], AREAS["scheduler"]]) for _ in range(2)]
    drawn = [[str(draw.next()) for _ in range(4)] for draw in draws]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 4


def test_every_file_of_the_engine_is_in_an_area() -> None:
    known = {path for area in AREAS.values() for path in area.sources()}
    patterns = [
        "onboard/ops/*.py",
        "onboard/ops/*/*.py",
        *(f"transforms/{stage}/*.py" for stage in STAGES),
    ]
    wanted = {
        path for pattern in patterns for path in ROOT.glob(pattern) if not _is_of_kernels(path)
    }
    left = {path.name for path in wanted - known} - {"__init__.py"}
    declarations = {"library.py", "written_forms.py", "dplr_calls.py"}
    # Mutants are not put into the processes of ranks
    between_ranks = {
        "collectives.py",
        "fused_all_reduce.py",
        "marked_shapes.py",
        "rank_embedding.py",
        "stage_exchange.py",
    }
    assert left == declarations | between_ranks | {"dense_prefill.py", "fla_delta_rule.py"}


def _is_of_kernels(path: Path) -> bool:
    """Whether a file has kernels, launches or writes them: those need a GPU."""
    is_kernel = path.stem.startswith(("triton_", "cuda_")) or path.stem.endswith("_kernels")
    return is_kernel or path.parent.name in ("triton", "cuda")


FOR_GPUS = """
class TokenReceiver:
    def receive(self, device, tokens, cuda):
        if cuda:
            tokens = tokens.float()
        elif tokens.is_cuda and len(tokens) < 1:
            tokens = tokens[0]
        self._when_landed(tokens, tokens < 2)
        return tokens.to(device), tokens.to(tokens.dtype), device.type == "cuda"

    def _when_landed(self, tokens):
        return tokens < 3
"""


def test_what_a_gpu_alone_would_notice_is_not_mutated() -> None:
    found = list(places(ast.parse(FOR_GPUS), Path("flight.py")))
    changed = {name for name, edit in OPERATORS.items() for node in found if edit(node) is not None}
    assert changed == {"cast or mask dropped"}
    dropped = [
        ast.unparse(node) for node in found if OPERATORS["cast or mask dropped"](node) is not None
    ]
    assert dropped == ["tokens.to(tokens.dtype)"]
