"""report: what was found, made, proven and generated, as Markdown and as one self-contained HTML
page.

Both are functions of the artifacts alone: the same artifacts give the same bytes.
"""

from __future__ import annotations

from typing import Any

from onboard.content import content_path
from onboard.render import render
from onboard.workflow.phase import Phase, PhaseResult, RunContext
from onboard.workflow.reporting.report_view import ARTIFACTS, files, found_artifacts, report_view

TEMPLATES = {
    "report": ("report.md", "report/report.md.j2"),
    "report_html": ("report.html", "report/report.html.j2"),
}
_STYLE = "report/style.css"
SHARED = ("report/about.md.j2", "report/notes.md.j2")
"""What the report and the text of the pull request have in common."""


class Report(Phase):
    """Writes `report.md` and `report.html` beside the other artifacts."""

    name = "report"

    def inputs(self, context: RunContext) -> dict[str, Any]:
        """Depend on the templates and on everything that the report shows."""
        names = [*(template for _, template in TEMPLATES.values()), _STYLE, *SHARED]
        paths = [content_path("templates", name, root=context.root) for name in names]
        return {
            "templates": [context.files.digest(path) for path in paths],
            "artifacts": context.digest(
                "spec.yaml", "agents.json", *(f"{name}.json" for name in ARTIFACTS)
            ),
            "files": files(context, found_artifacts(context)),
        }

    def run(self, context: RunContext) -> PhaseResult:
        """Render both."""
        view = report_view(context)
        artifacts = {}
        for name, (file_name, template) in TEMPLATES.items():
            path = context.artifact(file_name)
            context.files.write(path, render(template, context.root, **view))
            artifacts[name] = context.relative(path)
        return PhaseResult(artifacts=artifacts, summary=artifacts["report_html"])
