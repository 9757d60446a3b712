"""What comes from a model's code names no file but the model's: the spec is compared with what was
read here, and nothing is written out of the root.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onboard.analysis.repository_source import survey_code
from onboard.analysis.spec import ModelSpec, RepositoryCode
from onboard.errors import OnboardError
from onboard.workflow.files import FileWriter
from onboard.workflow.remote.agreed import check_spec
from tests.support.phases import make_spec

CONFIG = {
    "model_type": "x",
    "width": 3,
    "auto_map": {
        "AutoConfig": "configuration_x.XConfig",
        "AutoModelForCausalLM": "modeling_x.XModel",
    },
}


@pytest.fixture
def context(tmp_path: Path) -> Any:
    """A context with as much as is compared."""
    (tmp_path / "configuration_x.py").write_text("class XConfig:\n    pass\n")
    (tmp_path / "modeling_x.py").write_text("class XModel:\n    pass\n")
    source = SimpleNamespace(config=lambda: CONFIG, files=lambda: tmp_path, revision=None)
    return SimpleNamespace(source=source, model="/x")


def _spec(context: Any, **changes: Any) -> ModelSpec:
    survey = survey_code(context.source.files(), CONFIG)
    code = RepositoryCode(classes=survey.classes, files=survey.files, facts=[], native={})
    fields = {
        "model": "/x",
        "family": "x",
        "architecture": "XModel",
        "config_class": "XConfig",
        "hf_module": "repository_code.modeling_x",
        "repository": code,
        "revision": None,
    }
    model = fields.pop("model")
    return make_spec(str(model), **(fields | changes)).model_copy(update={"config": CONFIG})


def test_a_true_spec_is_taken(context: Any) -> None:
    check_spec(_spec(context), context)
    check_spec(_spec(context, config_class="LlamaOwnCodeConfig"), context)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("family", "y"),
        ("model", "/y"),
        ("revision", "main"),
        ("config", {**CONFIG, "width": 4}),
        ("hf_module", "os.path"),
        ("hf_module", "repository_code.other"),
        ("architecture", "LlamaForCausalLM"),
        ("config_class", "LlamaConfig"),
        ("config_class", "NonesuchOwnCodeConfig"),
        ("repository", None),
    ],
)
def test_a_spec_of_something_else_is_refused(context: Any, field: str, value: object) -> None:
    spec = _spec(context).model_copy(update={field: value})
    with pytest.raises(OnboardError, match=f"is not of this model .*{field if value else 'files'}"):
        check_spec(spec, context)


def test_a_file_of_other_content_or_name_is_refused(context: Any) -> None:
    spec = _spec(context)
    assert spec.repository is not None
    for files in ({**spec.repository.files, "modeling_x.py": "0"}, {}):
        code = spec.repository.model_copy(update={"files": files})
        with pytest.raises(OnboardError, match="files"):
            check_spec(spec.model_copy(update={"repository": code}), context)


@pytest.mark.parametrize(
    "name", ["../x.py", "/x.py", "a/../../x.py", "a//x.py", "a\\x.py", "", ".x"]
)
def test_a_spec_names_files_of_the_repository_alone(context: Any, name: str) -> None:
    text = _spec(context).to_yaml()
    assert "modeling_x.py: " in text
    with pytest.raises(OnboardError, match="spec is not valid"):
        ModelSpec.from_yaml(text.replace("modeling_x.py: ", f"{name!r}: "))


@pytest.mark.parametrize("family", ["x/../../y", "..", "x\ny", "/etc/x"])
def test_a_family_is_no_path(context: Any, family: str) -> None:
    text = _spec(context).to_yaml()
    assert "family: x\n" in text
    with pytest.raises(OnboardError, match="spec is not valid"):
        ModelSpec.from_yaml(text.replace("family: x\n", f"family: {family!r}\n"))


def test_nothing_is_written_out_of_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "file.txt").symlink_to(outside / "file.txt")
    files, held = FileWriter(root=root), FileWriter(root=root, held=True)
    for path in (
        root / ".." / "outside" / "a",
        root / "link" / "a",
        outside / "a",
        root / "x" / "..",
    ):
        for writer in (files, held):
            with pytest.raises(OnboardError, match="leads out of the root"):
                writer.write(path, "x")
    files.write(root / "new" / "a", "x")
    files.write(root / "file.txt", "x")  # the link is replaced, not followed
    assert list(outside.iterdir()) == []
    assert (root / "new" / "a").read_text() == "x"
