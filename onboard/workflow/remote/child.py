"""`python -m onboard.workflow.remote.child FOLDER LIMITS`: do the tasks that files in FOLDER
describe, answer there.

The restrictions come first: nothing of the repository is imported before them.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from onboard.errors import OnboardError
from onboard.workflow.remote.sandbox import Limits, enter


def main(folder: Path, limits: Limits) -> None:
    """Give up what is not needed; then, for each name on standard input, do `NAME.request` and
    write `NAME.reply`.
    """
    os.chdir(folder)
    facts = enter(folder, limits)
    for line in sys.stdin:
        name = line.strip()
        request = json.loads((folder / f"{name}.request").read_text(encoding="utf-8"))
        unfinished = folder / f"{name}.part"
        unfinished.write_text(json.dumps(_reply(request) | {"facts": facts}), encoding="utf-8")
        unfinished.rename(folder / f"{name}.reply")
    os._exit(0)  # whatever threads the code has started


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": _work(request)}
    except OnboardError as error:
        return {"error": error.message, "hint": error.hint}
    except BaseException as error:  # whatever the repository's code raises
        traceback.print_exc()
        return {
            "error": f"the model's code failed ({' '.join(f'{type(error).__name__}: {error}'.split())[:300]})"
        }


def _work(request: dict[str, Any]) -> Any:
    from onboard.analysis.repository import install
    from onboard.workflow.remote.tasks import TASKS

    code, config = Path(request["code"]), request["config"]
    if request["task"] != "run_pytest":  # that does so in the process that it starts
        install(code, config)
    return TASKS[request["task"]](code, config, **request["arguments"])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Limits.model_validate_json(sys.argv[2]))
