"""The tools that an endpoint may call: they read and change copies in memory, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onboard.agents.patch import with_block, with_diff
from onboard.agents.refused import RefusedError
from onboard.agents.workspace import Workspace

_MOST_READ = 2**17
"""Letters of a file that are given at a time."""
_STRING = {"type": "string"}


def _tool(name: str, description: str, /, **parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": parameters,
        "required": [key for key, value in parameters.items() if not value.get("optional")],
    }
    for value in parameters.values():
        value.pop("optional", None)
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("list_dir", "List the files.", path={**_STRING, "optional": True}),
    _tool(
        "read_file",
        f"Read a file, up to {_MOST_READ:,} letters from `offset` on.",
        path=dict(_STRING),
        offset={"type": "integer", "optional": True},
    ),
    _tool(
        "propose_patch",
        "Change a file that is yours to change: a unified diff, or `path`, `name` and `text` of a "
        "class that is written anew.",
        diff={**_STRING, "optional": True},
        path={**_STRING, "optional": True},
        name={**_STRING, "optional": True},
        text={**_STRING, "optional": True},
    ),
    _tool("run_tests", "Test the files with your changes; says the first thing that is wrong."),
]


@dataclass
class Desk:
    """The copies as the tools have left them."""

    workspace: Workspace
    changed: dict[str, str] = field(default_factory=dict)

    def call(self, name: str, arguments: str) -> str:
        """Return what a tool says; what is wrong with a call is told to the caller."""
        tools: dict[str, Callable[..., str]] = {
            "list_dir": self._list_dir,
            "read_file": self._read_file,
            "propose_patch": self._propose_patch,
            "run_tests": self._run_tests,
        }
        try:
            given = json.loads(arguments or "{}")
            if name not in tools or not isinstance(given, dict):
                raise RefusedError(f"there is no such tool: {name[:100]}")
            return tools[name](**given)
        except RefusedError as error:
            return f"refused: {error}"
        except (ValueError, TypeError, RecursionError) as error:
            return f"refused: the arguments are not as the tool has them ({str(error)[:200]})"

    def _texts(self) -> dict[str, str]:
        return {**self.workspace.files, **self.changed}

    def _list_dir(self, path: str = "") -> str:
        below = path.strip("./")
        names = [name for name in self._texts() if name.startswith(f"{below}/" if below else "")]
        return "\n".join(
            f"{name}{' (yours to change)' if name in self.workspace.editable else ''}"
            for name in sorted(names)
        )

    def _read_file(self, path: str, offset: int = 0) -> str:
        texts = self._texts()
        if path not in texts:
            raise RefusedError(f"there is no file {path[:200]}")
        return texts[path][max(0, offset) : max(0, offset) + _MOST_READ]

    def _propose_patch(self, diff: str = "", path: str = "", name: str = "", text: str = "") -> str:
        if diff:
            self.changed |= with_diff(self._texts(), diff, self.workspace.editable)
            return "applied"
        if path not in self.workspace.editable:
            raise RefusedError(f"{path[:200]} is not yours to change")
        self.changed[path] = with_block(self._texts()[path], name, text)
        return "applied"

    def _run_tests(self) -> str:
        if self.workspace.judge is None:
            raise RefusedError("there is nothing to test")
        verdict = self.workspace.judge(self.changed)
        return f"{'passed' if verdict.passed else 'failed'}: {verdict.said}"
