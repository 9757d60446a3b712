"""`onboard export --to plain`: the model file as it is, with the ops that it calls as functions of
PyTorch.
"""

from __future__ import annotations

from onboard.codegen.format import format_python
from onboard.render import render
from onboard.standalone.exported_text import with_functions
from onboard.standalone.package import bundled, package_name, project
from onboard.standalone.proven_model import Subject


def plain_export(subject: Subject) -> dict[str, str]:
    """Return the files of a package that needs PyTorch, safetensors and what the model file itself
    imports.
    """
    name = package_name(subject)
    files = bundled(with_functions(subject.text)).files()
    exported = project(subject, "plain", name, files)
    if subject.counterpart is not None:
        test = render("export/plain/test_against_transformers.py.j2", package=name, subject=subject)
        exported["tests/test_against_transformers.py"] = format_python(test)
    return exported
