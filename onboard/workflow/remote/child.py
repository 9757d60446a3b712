"""`python -m onboard.workflow.remote.child FOLDER`: do the task that FOLDER/request.json describes, and answer there.

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

REQUEST, REPLY = "request.json", "reply.json"


def main(folder: Path) -> None:
    """Read the request, give up what is not needed, work, reply."""
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    os.chdir(folder)
    facts = enter(folder, Limits.model_validate(request["limits"]))
    try:
        reply: dict[str, Any] = {"result": _work(request), "facts": facts}
    except OnboardError as error:
        reply = {"error": error.message, "hint": error.hint}
    except BaseException as error:  # whatever the repository's code raises
        traceback.print_exc()
        reply = {"error": f"the model's code failed ({' '.join(f'{type(error).__name__}: {error}'.split())[:300]})"}
    unfinished = folder / f"{REPLY}.part"
    unfinished.write_text(json.dumps(reply), encoding="utf-8")
    unfinished.rename(folder / REPLY)
    os._exit(0)  # whatever threads the code has started


def _work(request: dict[str, Any]) -> Any:
    from onboard.analysis.repository import install
    from onboard.workflow.remote.tasks import TASKS

    code, config = Path(request["code"]), request["config"]
    if request["task"] != "run_pytest":  # that does so in the process that it starts
        install(code, config)
    return TASKS[request["task"]](code, config, **request["arguments"])


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
