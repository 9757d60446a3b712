"""A repairer's assignment on a file of three lines, whose "tests" look for one word."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onboard.agents.assignment import Assignment
from onboard.agents.role_runs import Records
from onboard.agents.role_settings import Command, OpenAI
from onboard.agents.roles import REPAIRER, RepairTask
from onboard.agents.workspace import Verdict, Workspace
from onboard.workflow.files import write_atomically

MODEL, SPEC, TESTS = "models/modeling_x.py", "spec.yaml", "tests/test_x.py"
BAD = "class X:\n    def forward(self, x):\n        return x * 2\n"
GOOD = BAD.replace("x * 2", "x * 3")
DIFF = f"""--- a/{MODEL}
+++ b/{MODEL}
@@ -1,3 +1,3 @@
 class X:
     def forward(self, x):
-        return x * 2
+        return x * 3
"""
TEST = "def test_x():\n    assert X().forward(1) == 3\n"


def judge(changed: Mapping[str, str]) -> Verdict:
    passed = "x * 3" in changed.get(MODEL, BAD)
    return Verdict(passed, "error 0.0" if passed else "X differs: 2 where there is 3")


def workspace() -> Workspace:
    files = {MODEL: BAD, SPEC: "family: x\n", TESTS: TEST}
    return Workspace(files, frozenset({MODEL, SPEC}), judge)


def assignment(folder: Path, settings: Command | OpenAI) -> Assignment:
    task = RepairTask(
        model="acme/x",
        model_file=MODEL,
        spec_file=SPEC,
        place="x",
        block="X",
        problem="X differs: 2 where there is 3",
        ours=BAD,
        theirs=GOOD,
        ops="torch_rmsnorm",
    )
    return Assignment(REPAIRER, task, settings, workspace(), Records.load(folder, write_atomically))


def scripted(script: str, **changes: Any) -> Command:
    """Settings of an agent that is a few lines of Python."""
    fields = {"command": [sys.executable, "-S", "-c", script], "attempts": 1, "seconds": 20}
    return Command(**fields | changes)
